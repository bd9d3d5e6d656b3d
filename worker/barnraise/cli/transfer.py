"""Run `barnraise fetch`, `serve` and `export`: get a run's weights from peers or this machine."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from barnraise.cli.console import configure_logging, out, stop_on_signals
from barnraise.cli.machine_options import (
    HardwareOption,
    HomeOption,
    hardware_view,
    measure_machine,
    open_state_dir,
)
from barnraise.errors import CoordinatorError, StateError

if TYPE_CHECKING:
    from barnraise.training.train import Worker

W = TypeVar("W", bound="Worker")
RunArgument = Annotated[str, typer.Argument(help="The run's name in its address, or its id.")]


def fetch(
    run: RunArgument,
    folder: Annotated[Path, typer.Argument(help="Folder for the model, for Hugging Face.")],
    digest: Annotated[
        str, typer.Option(help="Digest of the weights on the site; others are refused.")
    ] = "",
    home: HomeOption = None,
    hardware: HardwareOption = None,
) -> None:
    """Download a run's weights from machines that train in it or share it."""
    from barnraise.training.model_transfer import ModelFetcher

    worker = _create_worker(ModelFetcher, run, home, hardware)
    worker.run()
    if worker.leaving.is_set():
        return
    if digest and not worker.digest.startswith(digest):
        raise StateError(
            f"the peers have {worker.digest} at {worker.tokens:,} tokens, "
            f"and you requested {digest}"
        )
    out.print(f"BLAKE3 of the weights: {worker.digest}", soft_wrap=True)
    export(run, folder, home)


def serve(
    run: Annotated[str, typer.Argument(help="A run that this machine has trained in.")],
    home: HomeOption = None,
    hardware: HardwareOption = None,
) -> None:
    """Share a run's weights until Ctrl-C, without training."""
    from barnraise.training.model_transfer import ModelServer

    worker = _create_worker(ModelServer, run, home, hardware)
    out.print("Sharing. Press Ctrl-C to stop.")
    worker.run()
    if worker.reporter.refused:
        raise CoordinatorError(worker.reporter.refused)


def export(
    run: RunArgument,
    folder: Annotated[Path, typer.Argument(help="Folder for config.json and model.safetensors.")],
    home: HomeOption = None,
) -> None:
    """Write this machine's last state of a run for Hugging Face's GPT-2 class."""
    from barnraise.exchange.ledger.blob_store import BlobStore
    from barnraise.protocol.coordinator_messages import TextManifest
    from barnraise.protocol.signing import open_signed
    from barnraise.spec import RunSpec
    from barnraise.training.checkpoint import CheckpointSlots
    from barnraise.training.export import export_model
    from barnraise.training.join import find_saved_run
    from barnraise.training.resume import DiskState, read_state_header

    state_dir = open_state_dir(home)
    saved_run = find_saved_run(state_dir, run)
    if saved_run is None or saved_run.manifest is None:
        raise StateError(f"this machine has never worked on '{run}'")
    run_folder = state_dir.path / "runs" / saved_run.id
    model = RunSpec.from_json(saved_run.spec).model
    tokenizer = open_signed(saved_run.manifest, "manifest", TextManifest).tokenizer
    tokenizer_path = BlobStore(run_folder / "blobs").path(tokenizer) if tokenizer else None
    if read_state_header(run_folder / "state") is None:
        checkpoint = CheckpointSlots(run_folder / "checkpoint").load()
        if checkpoint is None:
            raise StateError(f"this machine has no checkpoint of '{run}' yet")
        weights, header = checkpoint
        export_model(folder, model, weights, tokenizer_path)
        tokens = header.tokens
    else:
        # A running worker would change the state on disk while it is read: lock the folder.
        with contextlib.closing(state_dir.open_run(saved_run.id)):
            state = DiskState(model, run_folder / "state")
            export_model(folder, model, state, tokenizer_path)
            tokens = state.header.tokens
            state.close()
    out.print(f"Wrote the weights at {tokens:,} tokens to {folder}")


def _create_worker(kind: type[W], run: str, home: Path | None, hardware_cache: Path | None) -> W:
    """Join a run and return a worker of this kind for it.

    Raises:
        BarnraiseError: the run cannot be joined.
        typer.Exit: Ctrl-C was pressed before the run was launched.
    """
    from barnraise.training.join import join_run

    configure_logging()
    leaving = stop_on_signals()
    state_dir = open_state_dir(home)
    hardware = measure_machine(state_dir, hardware_cache)
    joined = join_run(state_dir, run, leaving, hardware_view(hardware))
    if joined is None:
        raise typer.Exit
    return kind(joined, leaving, hardware, state_dir.limits)
