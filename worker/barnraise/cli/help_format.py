"""Show a command's options as people read them: a switch has no type."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption


class HelpfulCommand(TyperCommand):
    """A command whose help shows no type for switches: `--watch <bool>` seems to take a value."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, also those that Typer adds."""
        return _without_types_of_switches(super().get_params(ctx))


class HelpfulGroup(TyperGroup):
    """The same for a command that has subcommands."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, also those that Typer adds."""
        return _without_types_of_switches(super().get_params(ctx))


def _without_types_of_switches(params: Any) -> Any:
    for param in params:
        if isinstance(param, TyperOption) and param.is_bool_flag:
            param.metavar = ""
    return params


class HelpfulTyper(typer.Typer):
    """A Typer app whose commands have such a help."""

    def __init__(self, **options: Any) -> None:
        """Take what `typer.Typer` takes."""
        super().__init__(cls=HelpfulGroup, **options)

    def command(self, name: str | None = None, **options: Any) -> Any:
        """Register a command, as `typer.Typer` does."""
        return super().command(name, cls=HelpfulCommand, **options)
