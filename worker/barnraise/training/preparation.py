"""Build a draft's text in the folder of its run: read, inspect, tokenise, store as blobs.

Temporary files lie in the run's folder, and an interrupted preparation continues there.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from barnraise.errors import TextError, TextUnreachableError
from barnraise.formats import format_amount, format_bytes
from barnraise.protocol.coordinator_messages import TextCounts, TextManifest
from barnraise.spec import MAX_VOCABULARY, RunSpec
from barnraise.text.existing_tokenizer import ExistingTokenizer
from barnraise.text.inspection import Inspection, inspect_source
from barnraise.text.progress import LogProgress, ReportProgress, ignore_progress
from barnraise.text.reading import TextSource, open_source, places_of
from barnraise.text.shards import StoreBlob, TextPlan, build_shards
from barnraise.text.source_file import FileReport
from barnraise.text.spool import DocumentSpool, find_duplicates
from barnraise.text.tokenizer import load_tokenizer

log = logging.getLogger("barnraise")

SPOOL_FOLDER = "text"  # in the run's folder
# Bytes on the disk for each byte of text: the spool, the tokens and their shards.
SPACE_FACTORS = {"bytes": 5.0, "bpe": 2.5}
COMPRESSED_FACTOR = 4.0  # bytes of text that a stored byte may stand for, if it is compressed
READING = "reading"

Confirm = Callable[[Inspection], bool]
OpenProgress = Callable[[], AbstractContextManager[ReportProgress]]


def confirm_usable(inspection: Inspection) -> bool:
    """Use every text that can be used, and log what is remarkable about it.

    Raises:
        TextError: the text cannot be used.
    """
    for warning in inspection.warnings:
        log.warning("%s", warning)
    if inspection.refusal:
        raise TextError(inspection.refusal)
    log.info(
        "%s in %s; left out: %d",
        format_amount(inspection.documents, "document"),
        format_amount(len(inspection.files), "file"),
        len(inspection.left_out),
    )
    return True


@dataclass(frozen=True)
class TextPreparation:
    """How a text is prepared."""

    paths: tuple[str, ...] = ()  # files and folders, for the source "files"
    tokenizer: ExistingTokenizer | None = None
    # Decides by an inspection whether the text is used; may raise.
    confirm: Confirm = confirm_usable
    # Shows how far the work is.
    open_progress: OpenProgress = field(
        default=lambda: contextlib.nullcontext(LogProgress()), repr=False
    )


def build_text(
    folder: Path,
    plan: TextPlan,
    preparation: TextPreparation,
    store_blob: StoreBlob,
) -> TextManifest:
    """Read a run's text and store its shards.

    Raises:
        TextError: the text cannot be used.
    """
    check_tokenizer(plan, preparation.tokenizer)
    places = places_of(plan.text, preparation.paths)
    for leftover in folder.glob("barnraise-*"):  # downloads of a preparation that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        with preparation.open_progress() as progress:
            source = stack.enter_context(open_source(places, folder, progress))
        if preparation.tokenizer is not None:
            source.render_chat = preparation.tokenizer.render_chat
        rendering = preparation.tokenizer.digest if preparation.tokenizer else ""
        spool = DocumentSpool(folder / SPOOL_FOLDER, source.fingerprint(rendering))
        with contextlib.closing(spool):
            if spool.was_resumed:
                log.info("continuing the preparation that was interrupted")
            else:
                _confirm(source, plan, preparation)
            if not spool.state.is_complete:
                _check_space(folder, source, plan)
                with preparation.open_progress() as progress:
                    fill_spool(spool, source, progress)
            with preparation.open_progress() as progress:
                manifest = build_shards(spool, plan, store_blob, progress)
            counts = count_text(spool, source)
        spool.remove()
        return manifest.model_copy(update={"counts": counts})


def check_tokenizer(plan: TextPlan, named: ExistingTokenizer | None) -> None:
    """Refuse a named tokenizer that the run cannot use, before anything is read.

    Raises:
        TextError: with what to change.
    """
    if plan.text.tokenizer == "bytes":
        if named is not None:
            raise TextError(
                "the tokenizer of this run is plain bytes: choose byte-pair encoding in the run's "
                "form, or leave --tokenizer out"
            )
        return
    if plan.tokenizer_file is None:
        return
    tokenizer = load_tokenizer(plan.tokenizer_file, plan.vocabulary, "the tokenizer")
    if named is not None and named.file != plan.tokenizer_file:
        other = load_tokenizer(named.file, MAX_VOCABULARY, "the tokenizer after --tokenizer")
        if tokenizer.get_vocab() != other.get_vocab():
            raise TextError(
                "this run begins with weights that have a tokenizer of their own, and --tokenizer "
                "names another one: leave it out"
            )


def _confirm(source: TextSource, plan: TextPlan, preparation: TextPreparation) -> None:
    with preparation.open_progress() as progress:
        inspection = inspect_source(source, plan, progress)
    if not preparation.confirm(inspection):
        raise TextError("nothing was prepared")


def _check_space(folder: Path, source: TextSource, plan: TextPlan) -> None:
    """Refuse to begin what the disk cannot hold. Raises TextError."""
    size = 0.0
    for file in source.files:
        is_compressed = file.path.casefold().endswith((".gz", ".zst", ".bz2", ".xz", ".parquet"))
        size += file.size * (COMPRESSED_FACTOR if is_compressed else 1.0)
    needed = int(size * SPACE_FACTORS[plan.text.tokenizer])
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise TextError(
            f"preparing this text needs about {format_bytes(needed)} in {folder}, and "
            f"{format_bytes(free)} are free there"
        )


def fill_spool(
    spool: DocumentSpool, source: TextSource, progress: ReportProgress = ignore_progress
) -> None:
    """Read the files of a source into a spool, from the first one on that it lacks.

    Raises:
        TextError: a file that was named itself cannot be used, or there is no text.
    """
    for index in range(spool.state.files, len(source.files)):
        file = source.files[index]
        report = FileReport(file.path)
        done = sum(file.size for file in source.files[:index])
        try:
            for piece in source.read(index, report):
                spool.append(piece)
                progress(READING, min(done + report.bytes, done + file.size), source.size)
        except TextUnreachableError:
            raise  # leaving the file out would change the text with the hub's state
        except TextError as error:
            source.leave_out(index, str(error))
            spool.finish_file(None, (source.left_out[-1].path, source.left_out[-1].reason))
        else:
            spool.finish_file(report)
    spool.finish()
    if not spool.state.reports:
        raise TextError("there is no text: every file is left out")


def count_text(spool: DocumentSpool, source: TextSource) -> TextCounts:
    """Return what the run's page shows of a text: counts, and nothing of the text itself."""
    reports = spool.state.reports
    left_out = {item.path for item in source.left_out}
    left_out.update(path for path, _ in spool.state.left_out)
    return TextCounts(
        files=len(reports),
        left_out=len(left_out),
        documents=sum(report.documents for report in reports),
        duplicates=int(find_duplicates(spool.documents).sum()),
        skipped_rows=sum(report.skipped_rows for report in reports),
        bytes=sum(report.bytes for report in reports),
        characters=sum(report.characters for report in reports),
    )


def plan_text(spec: RunSpec, run: str, tokenizer_file: bytes | None) -> TextPlan:
    """Return the plan of a draft's text."""
    return TextPlan(
        spec.text,
        spec.model.vocabulary,
        run,
        spec.model.context,
        tokenizer_file,
        may_shrink=not spec.start.has_weights,  # whose vocabulary is fixed
        prompts=spec.prompts,
    )
