"""Build the `barnraise` command: register its commands, print errors, set the exit code.

`COMMANDS` lists them by purpose.
"""

import os
import sys
from typing import Annotated

import typer
from rich.markup import escape

from barnraise import __version__
from barnraise.cli.console import errors, out, replace_unprintable
from barnraise.cli.control import leave, pause, resume, stop
from barnraise.cli.crew import crew
from barnraise.cli.doctor.command import doctor
from barnraise.cli.evaluate import evaluate
from barnraise.cli.help_format import HelpfulTyper
from barnraise.cli.join import join
from barnraise.cli.key import key
from barnraise.cli.limits import limits
from barnraise.cli.log_file import logs
from barnraise.cli.login import login, logout
from barnraise.cli.machines import machines
from barnraise.cli.plan import plan
from barnraise.cli.prepare import prepare
from barnraise.cli.privacy import privacy
from barnraise.cli.removal import remove
from barnraise.cli.run_history import runs
from barnraise.cli.sample import sample
from barnraise.cli.service.command import service
from barnraise.cli.status import status
from barnraise.cli.text import text
from barnraise.cli.transfer import export, fetch, serve
from barnraise.cli.update import update
from barnraise.cli.verdict import verdict
from barnraise.coordinator_client.redaction import redact
from barnraise.errors import BarnraiseError
from barnraise.swap.torch_environment import configure_torch_environment

EXAMPLES = """
Train in a run: `barnraise join https://train.example.org/runs/first-barn`

Look at it from another terminal: `barnraise status --watch`, `barnraise logs -f`

Export the model: `barnraise export first-barn my-model`
"""

READER_GONE = 141  # the exit code of a program that the signal SIGPIPE ends

app = HelpfulTyper(
    rich_markup_mode="markdown",
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train a GPT together, each on their own computer.",
    epilog=EXAMPLES,
)

# `barnraise --help` lists the commands by purpose, in this order.
COMMANDS = {
    "Start": (login, doctor, plan, limits, privacy, update, logout, remove),
    "Train": (join, status, logs, pause, resume, stop, leave),
    "Use the model": (fetch, export, serve, sample, evaluate),
    "Organise runs": (prepare, verdict),
}
for purpose, functions in COMMANDS.items():
    for function in functions:
        app.command(rich_help_panel=purpose)(function)
app.add_typer(key, name="key", rich_help_panel="Start")
app.add_typer(crew, name="crew", rich_help_panel="Train")
app.add_typer(service, name="service", rich_help_panel="Train")
app.add_typer(text, name="text", rich_help_panel="Organise runs")
app.add_typer(runs, name="runs", rich_help_panel="Organise runs")
app.add_typer(machines, name="machines", rich_help_panel="Organise runs")


def main() -> None:
    """Run the command; print an expected error as one sentence on stderr, with exit code 1.

    Only a bug of Barnraise shows a traceback. A reader of the output that has enough, like
    `head -1`, ends the command without a word.
    """
    replace_unprintable()
    configure_torch_environment()
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except (SystemExit, BrokenPipeError) as end:
        # The handlers of rich and Typer exit with 1.
        if not any(isinstance(cause, BrokenPipeError) for cause in (end, end.__context__)):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):  # the last flush at the exit would fail
            os.dup2(nowhere, number)
        raise SystemExit(READER_GONE) from None
    except (BarnraiseError, OSError) as error:
        errors.print_sentence(f"[bold red]barnraise:[/] {escape(redact(str(error)))}")
        raise SystemExit(1) from None


@app.callback(invoke_without_command=True)
def print_version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Print the version, if it is requested."""
    if show:
        out.print(f"barnraise {__version__}")
        raise typer.Exit


if __name__ == "__main__":
    main()
