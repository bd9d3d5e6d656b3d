"""Run `barnraise fetch`, `serve` and `export`: get a run's weights from peers or this machine."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from rich.markup import escape

from barnraise.cli.addresses import RunAddress, RunArgument
from barnraise.cli.console import out
from barnraise.cli.log_file import configure_worker_logging
from barnraise.cli.machine_options import (
    HardwareOption,
    HomeOption,
    MachineOptions,
    hardware_view,
    measure_machine,
    open_state_dir,
)
from barnraise.cli.option_groups import option
from barnraise.cli.run_folders import refuse_unknown_run
from barnraise.cli.signals import stop_on_signals
from barnraise.cli.site_access import find_run, open_site
from barnraise.errors import CoordinatorError, StateError
from barnraise.state_dir import StateDir

if TYPE_CHECKING:
    from barnraise.training.model_files.output_folder import ExportTarget
    from barnraise.training.train import Worker

PUSH_FOLDER = "push"  # in the state directory: an export that only the hub is to have
W = TypeVar("W", bound="Worker")
FolderArgument = Annotated[Path, typer.Argument(help="A new folder for the model's files.")]


@dataclass(frozen=True)
class ExportOptions:
    """How a model is written."""

    format: Literal["hf", "gguf"] = option(
        "hf", "hf: for transformers; gguf: for llama.cpp and Ollama."
    )
    dtype: Literal["fp32", "bf16"] = option("fp32", "Numbers of the written weights.")
    license: str = option("unknown", "Licence in the model card, as the Hugging Face hub names it.")


def fetch(
    run: RunArgument,
    folder: FolderArgument,
    digest: Annotated[
        str, typer.Option(help="Digest of the weights on the site; others are refused.")
    ] = "",
    *,
    options: ExportOptions,
    home: HomeOption = None,
    hardware: HardwareOption = None,
) -> None:
    """Download a run's weights from machines that train in it or share it."""
    state_dir = open_state_dir(home)
    _choose_target(state_dir, folder)  # refuse a folder before anything is fetched
    open_site(state_dir, run)
    find_run(state_dir, run.name)
    from barnraise.training.model_transfer import ModelFetcher

    worker = _create_worker(ModelFetcher, run, state_dir, hardware)
    worker.run()
    if worker.leaving.is_set():
        return
    if digest and not worker.digest.startswith(digest):
        raise StateError(
            f"the peers have {worker.digest} at {worker.tokens:,} tokens, "
            f"and you requested {digest}"
        )
    out.print(f"BLAKE3 of the weights: {worker.digest}", soft_wrap=True)
    _write_export(state_dir, run.name, folder, options)


def serve(
    run: RunArgument,
    home: HomeOption = None,
    hardware: HardwareOption = None,
) -> None:
    """Share a run's weights until Ctrl-C, without training."""
    state_dir = open_state_dir(home)
    open_site(state_dir, run)
    find_run(state_dir, run.name)
    from barnraise.training.model_transfer import ModelServer

    worker = _create_worker(ModelServer, run, state_dir, hardware)
    out.print("Sharing. Press Ctrl-C to stop.")
    worker.run()
    if worker.reporter.refused:
        raise CoordinatorError(worker.reporter.refused)


@dataclass(frozen=True)
class PushOptions:
    """Where on the Hugging Face hub an export goes."""

    push: str = option(
        "",
        "Push it to this model repository of the Hugging Face hub, with your HF_TOKEN.",
        metavar="OWNER/NAME",
    )
    private: bool = option(False, "Create that repository as a private one.", "--private")


def export(
    run: RunArgument,
    folder: Annotated[
        Path | None, typer.Argument(help="A new folder for the model's files.")
    ] = None,
    *,
    options: ExportOptions,
    hub: PushOptions,
    home: HomeOption = None,
) -> None:
    """Write this machine's last state of a run for other programs.

    The folder must be new or empty, or hold an earlier export without changes: nothing else is
    ever overwritten or deleted.

    Example: barnraise export first-barn my-model --license apache-2.0 --push ada/my-model
    """
    state_dir = open_state_dir(home)
    if not hub.push:
        if folder is None:
            raise StateError("name a new folder for the model's files, or --push OWNER/NAME")
        _write_export(state_dir, run.name, folder, options)
        return
    from barnraise.training.model_files.hub_push import HubRepository

    repository = HubRepository.choose(hub.push, hub.private)
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(_temporary_folder(state_dir))
        tokens = _write_export(state_dir, run.name, folder, options)
        message = f"Barnraise run {run.name} at {tokens:,} tokens"
        out.print(f"Pushing to {escape(hub.push)} …")
        out.print(repository.push(folder, message), soft_wrap=True)


@contextlib.contextmanager
def _temporary_folder(state_dir: StateDir) -> Iterator[Path]:
    """Yield a new folder on the disk of the state directory, and delete it afterwards."""
    folder = state_dir.path / PUSH_FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # of a push that was killed
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _choose_target(state_dir: StateDir, folder: Path) -> "ExportTarget":
    from barnraise.training.model_files.output_folder import ExportTarget

    return ExportTarget.choose(folder, state_dir.path / "exports")


def _write_export(state_dir: StateDir, run: str, folder: Path, options: ExportOptions) -> int:
    """Write the saved model of a run into a folder, complete or not at all.

    Returns:
        The tokens that the model was trained on.
    """
    # Importing torch takes seconds: what can be refused is refused before.
    refuse_unknown_run(state_dir, run)
    from barnraise.training.model_files.model_card import CardFacts
    from barnraise.training.model_files.trained_model import EXPORT_DTYPES, TrainedModel
    from barnraise.training.saved_model import open_saved_model

    target = _choose_target(state_dir, folder)
    dtype = EXPORT_DTYPES[options.dtype]
    if options.format == "gguf":
        from barnraise.training.model_files.gguf_export import export_gguf as write_files
    else:
        from barnraise.training.model_files.hugging_face_export import (
            export_hugging_face as write_files,
        )
    with open_saved_model(state_dir, run) as saved:
        facts = CardFacts(
            name=saved.name,
            run=saved.run,
            spec=saved.spec,
            tokens=saved.header.tokens,
            machines=saved.machines,
            validation=saved.validation,
            licence=options.license,
            score=saved.score,
        )
        trained = TrainedModel(saved.spec.model, saved.tensors, saved.tokenizer, facts)
        with target.replace(dtype.itemsize * saved.spec.model.parameters) as new:
            write_files(new, trained, dtype)
        tokens = saved.header.tokens
    out.print(f"Wrote the weights at {tokens:,} tokens to {escape(str(folder))}", soft_wrap=True)
    return tokens


def _create_worker(
    kind: type[W], run: RunAddress, state_dir: StateDir, hardware_cache: Path | None
) -> W:
    """Join a run and return a worker of this kind for it.

    Raises:
        BarnraiseError: the run cannot be joined.
        typer.Exit: Ctrl-C was pressed before the run was launched.
    """
    from barnraise.training.join import join_run

    configure_worker_logging(state_dir)
    leaving = stop_on_signals()
    hardware = measure_machine(state_dir, MachineOptions(hardware=hardware_cache))
    joined = join_run(
        state_dir, run.name, leaving, hardware_view(hardware), purpose=kind.join_purpose
    )
    if joined is None:
        raise typer.Exit
    return kind(joined, leaving, hardware, state_dir.limits)
