"""Show a command's parameters as people read them: without types where names say enough."""

import copy
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from barnraise.cli.option_groups import expand_option_groups


class HelpfulCommand(TyperCommand):
    """A command whose help shows no type for switches, and none for arguments with a metavar.

    `--watch <bool>` seems to take a value, and `<RunAddress>` is a class of ours. A switch and its
    opposite stand in one column and no range in another, so that sentences have room.
    """

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, also those that Typer adds."""
        return _without_needless_types(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, by copies of the options that are made for it."""
        shown = copy.copy(self)
        shown.params = [_narrow_option(param) for param in self.params]
        TyperCommand.format_help(shown, ctx, formatter)


class HelpfulGroup(TyperGroup):
    """The same for a command that has subcommands."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, also those that Typer adds."""
        return _without_needless_types(super().get_params(ctx))


def _without_needless_types(params: Any) -> Any:
    for param in params:
        if isinstance(param, TyperOption) and param.is_bool_flag:
            param.metavar = ""
        elif isinstance(param, TyperArgument) and param.metavar:
            param.display_type_rich = _describe_no_type
    return params


def _narrow_option(param: Any) -> Any:
    if not isinstance(param, TyperOption):
        return param
    narrow = copy.copy(param)
    narrow.min = narrow.max = None
    if param.multiple:
        narrow.metavar = "<str>"
    if param.secondary_opts:
        narrow.opts = [" / ".join([*param.opts, *param.secondary_opts])]
        narrow.secondary_opts = []
        if param.show_default and param.default is not None:
            chosen = param.opts if param.default else param.secondary_opts
            narrow.show_default = chosen[0].removeprefix("--")
    return narrow


def _describe_no_type(ctx: Any) -> str | None:
    return None


class HelpfulTyper(typer.Typer):
    """A Typer app whose commands have such a help, and may have groups of options."""

    def __init__(self, **options: Any) -> None:
        """Take what `typer.Typer` takes."""
        super().__init__(cls=HelpfulGroup, **options)

    def command(self, name: str | None = None, **options: Any) -> Any:
        """Register a command, as `typer.Typer` does."""
        return _expanding(super().command(name, cls=HelpfulCommand, **options))

    def callback(self, **options: Any) -> Any:
        """Register what runs before a command, as `typer.Typer` does."""
        return _expanding(super().callback(**options))


def _expanding(register: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that registers a function with its groups expanded, and returns it."""

    def decorate(function: Any) -> Any:
        register(expand_option_groups(function))
        return function

    return decorate
