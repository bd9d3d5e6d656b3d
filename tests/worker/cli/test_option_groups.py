"""Test that the fields of a dataclass become options of a command."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from barnraise.cli.option_groups import expand_option_groups


@dataclass(frozen=True)
class Paint:
    """Options for the tests."""

    colour: Annotated[str, typer.Option(help="Colour of the barn.")] = "red"
    coats: Annotated[list[int] | None, typer.Option("--coat", help="Thickness; repeatable.")] = None


@pytest.fixture
def app():
    """Return a command line with one command, which prints what it receives."""
    app = typer.Typer()

    @app.command()
    @expand_option_groups
    def paint(
        barn: Annotated[str, typer.Argument(help="Name of the barn.")],
        paint: Paint,
        twice: Annotated[bool, typer.Option("--twice")] = False,
    ) -> None:
        """Paint a barn."""
        print(barn, paint, twice)

    return app


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["north"], f"north {Paint()} False"),
        (
            ["--colour", "blue", "north", "--coat", "1", "--coat", "2", "--twice"],
            f"north {Paint('blue', [1, 2])} True",
        ),
    ],
)
def test_command_receives_its_options_as_a_dataclass(app, arguments, output):
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.output.strip()) == (0, output)


def test_help_shows_the_options_of_a_group(app):
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"})
    assert "Colour of the barn." in result.output and "[default: red]" in result.output
    assert "--coat" in result.output and "Paint a barn." in result.output


def test_option_with_an_invalid_value_is_refused(app):
    result = CliRunner().invoke(app, ["north", "--coat", "thick"])
    assert result.exit_code == 2 and "--coat" in result.output
