"""From a run's name to a place in it: its rules, its text's manifest, a ticket, a locked folder.

While a run is a draft its owner's worker may be told to prepare the text; everybody else waits for the launch. A
machine that holds a ticket enters without any coordinator, by what its folder kept of the last answer.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.coordinator_client.failover import FailoverClient
from barnraise.errors import CoordinatorError, CoordinatorUnreachableError, MessageError, StateError
from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.protocol.coordinator_messages import Directive, JoinReply, RunView, TextManifest
from barnraise.protocol.enums import RunStatus
from barnraise.protocol.messages import Peer, Signed
from barnraise.protocol.reports import HardwareView
from barnraise.protocol.signing import M, check_ticket, digest, open_signed
from barnraise.spec import RunSpec
from barnraise.state_dir import RunDir, StateDir
from barnraise.text import shards, sources

log = logging.getLogger("barnraise")

JOIN_REPLY_FILE = (
    "join.json"  # in a run's folder: the last JoinReply, for the day no coordinator answers
)
DIRECTIVE_FILE = "directive.json"  # …and the last directive that revoked somebody: they stay out while it is away
POLL_SECONDS = 1.0  # seconds between two looks at a draft, at least
RETRY_SECONDS = 30.0  # …and between two tries for the weights that one begins with


@dataclass(frozen=True)
class JoinedRun:
    """This machine's place in a launched run. `mark`: the last report the coordinator holds; `peers`: whom to dial."""

    run: str
    name: str
    machine: str
    folder: RunDir
    coordinator: CoordinatorClient | FailoverClient
    spec: RunSpec
    spec_digest: str
    manifest: TextManifest
    ticket: Signed
    directive: Directive
    acknowledged: int
    peers: tuple[Peer, ...]


@dataclass(frozen=True)
class InitialWeights:
    """Weights of another run, kept as blobs: each fragment's digest; and that run's tokenizer, as its file."""

    fragments: Sequence[str] = ()
    tokenizer: bytes | None = None


WeightsSource = Callable[
    [RunSpec, Callable[[bytes | memoryview], str]], InitialWeights
]  # (a spec, what keeps a blob); StateError


def join_run(
    home: StateDir,
    name: str,
    leaving: threading.Event,
    hardware: HardwareView | None = None,
    weights: WeightsSource | None = None,
) -> JoinedRun | None:
    """Waits for the launch if need be; None when `leaving` was set meanwhile. `name`: a run's id or slug; `hardware`:
    what the coordinator is told of this machine; `weights` gets those of another run, where this one begins with them.

    Raises StateError, CoordinatorError or MessageError with a sentence for the person at the keyboard.
    """
    membership = home.membership
    coordinator = FailoverClient.from_state_dir(home)
    try:
        run = coordinator.fetch_run(name).id
    except CoordinatorUnreachableError as error:
        known = find_saved_run(home, name)
        if known is None:
            raise
        run = known.id
        log.warning("%s; going on with the ticket this machine holds", error)
    folder = home.open_run(run)
    try:
        reply = _join(coordinator, folder, run, hardware)
        while reply.ticket is None:
            directive = _directed(reply, coordinator)
            _ended(reply)
            pause = max(POLL_SECONDS, directive.report_every)
            if (
                directive.prepare
                and not reply.run.manifest
                and not _prepare(coordinator, folder, reply, weights)
            ):
                pause = max(RETRY_SECONDS, pause)
            if leaving.wait(pause):
                folder.close()
                return None
            try:
                reply = _join(coordinator, folder, run, hardware)
            except (
                CoordinatorUnreachableError
            ) as error:  # who waits for a launch waits for its coordinator, too
                log.warning("%s; still waiting for the launch", error)
        return _placed(reply, folder, coordinator, membership.machine)
    except BaseException:
        folder.close()
        raise


def prepare_text(
    home: StateDir, name: str, paths: Sequence[Path], weights: WeightsSource | None = None
) -> RunView:
    """Prepares a draft's text from files of this machine, its owner's, and posts what came out. The shards lie in the
    run's folder from then on, and a worker there hands them to the others. Raises BarnraiseError."""
    coordinator = FailoverClient.from_state_dir(home)
    view = coordinator.fetch_run(name)
    if RunSpec.from_json(view.spec).text.source != "files":
        raise StateError(
            f"the text of '{view.name}' does not come from files: any machine of its owner prepares it"
        )
    if view.manifest is not None:
        raise StateError(f"the run '{view.name}' has its text already")
    folder = home.open_run(view.id)
    try:
        reply = _join(coordinator, folder, view.id, None)
        _ended(reply)
        if not _prepare(coordinator, folder, reply, weights, paths):
            raise StateError(
                f"the text of '{view.name}' waits for the weights it begins with: try again"
            )
        return coordinator.fetch_run(view.id)
    finally:
        folder.close()


def open_manifest(view: RunView) -> TextManifest:
    """What a run's text is, as its owner's machine signed it. Raises MessageError where nothing was prepared yet."""
    if view.manifest is None:
        raise MessageError(f"the text of '{view.name}' is not prepared yet")
    return open_signed(view.manifest, "manifest", TextManifest)


def _join(
    coordinator: FailoverClient, folder: RunDir, run: str, hardware: HardwareView | None
) -> JoinReply:
    try:
        reply = coordinator.join_run(run, [], hardware)
    except CoordinatorUnreachableError:
        path = folder.path / JOIN_REPLY_FILE
        if not path.exists():
            raise
        reply, newer = _kept(path), folder.path / DIRECTIVE_FILE
        return (
            reply.model_copy(update={"directive": _kept(newer, Signed)})
            if newer.exists()
            else reply
        )
    if reply.ticket:
        folder.save_message(JOIN_REPLY_FILE, reply)
    return reply


def find_saved_run(home: StateDir, name: str) -> RunView | None:
    """A run this machine has had a ticket for, by id or slug."""
    for path in home.run_folders():
        kept = path / JOIN_REPLY_FILE
        if kept.exists():
            view = _kept(kept).run
            if name in (view.id, view.slug):
                return view
    return None


def _kept(path: Path, shape: type[M] = JoinReply) -> M:
    try:
        return shape.model_validate_json(path.read_bytes())
    except ValidationError:
        raise StateError(
            f"{path} is damaged: remove it, and join while the coordinator answers"
        ) from None


def _prepare(
    coordinator: FailoverClient,
    folder: RunDir,
    reply: JoinReply,
    weights: WeightsSource | None,
    paths: Sequence[Path] = (),
) -> bool:
    """Builds the draft's text into the folder's blobs and posts what came out. False, with the reason in the log, where
    the weights it begins with cannot be had now."""
    draft, taken = RunSpec.from_json(reply.run.spec), InitialWeights()
    blobs = BlobStore(folder.path / "blobs")
    if draft.start.run:
        assert weights is not None, "whoever may be told to prepare can get them"
        try:
            taken = weights(draft, blobs.store)
        except StateError as error:
            log.warning(
                "the weights that '%s' begins with cannot be had now: %s", reply.run.name, error
            )
            return False
    log.info("preparing the text: source %s, tokenizer %s", draft.text.source, draft.text.tokenizer)
    documents = sources.read_documents(draft.text, paths)
    manifest = shards.prepare_text(
        draft.text, draft.model.vocabulary, reply.run.id, blobs.store, documents, taken.tokenizer
    )
    manifest = manifest.model_copy(update={"start": list(taken.fragments)})
    try:
        coordinator.submit_manifest(reply.run.id, manifest)
    except CoordinatorUnreachableError as error:
        log.warning("%s; the manifest goes out on the next try", error)
    except CoordinatorError as error:
        if error.status != 409:  # another of the owner's machines was quicker
            raise
    return True


def _ended(reply: JoinReply) -> None:
    if reply.run.status in (RunStatus.FINISHED, RunStatus.CANCELLED):
        raise CoordinatorError(
            f"the run '{reply.run.name}' is {reply.run.status}: there is nothing to train"
        )


def _directed(reply: JoinReply, coordinator: FailoverClient) -> Directive:
    """Raises MessageError for one that none of this machine's mirrors signed: a kept one may be of another than today's
    choice."""
    if reply.directive.key not in coordinator.keys:
        raise MessageError(
            f"the directive is signed by {reply.directive.key[:8]}, not a mirror of this machine's"
        )
    return open_signed(reply.directive, "directive", Directive)


def _mirrors(spec: RunSpec, coordinator: FailoverClient) -> frozenset[str]:
    """Whose tickets count in the run: its own mirrors', and, where those are of the mirror list, all of the list's."""
    roots, newest = frozenset(spec.roots), coordinator.newest_list
    return roots | newest.keys if newest and roots & newest.keys else roots


def _placed(
    reply: JoinReply, folder: RunDir, coordinator: FailoverClient, machine: str
) -> JoinedRun:
    """Checks by digest and signature that spec, manifest, ticket and directive hang together."""
    run, assigned = reply.run, digest(reply.run.spec)
    spec = RunSpec.from_json(run.spec)
    if run.manifest is None or digest(run.manifest.body) != spec.manifest:
        raise MessageError(f"the manifest of run '{run.name}' is not the one its spec names")
    manifest = open_signed(run.manifest, "manifest", TextManifest, spec.owner)
    if manifest.run != run.id:
        raise MessageError(f"the manifest of run '{run.name}' was made for another run")
    directive = _directed(reply, coordinator)
    if directive.run != run.id or directive.machine != machine:
        raise MessageError(
            f"the coordinator's directive is for another machine or run than '{run.name}'"
        )
    mirrors = _mirrors(spec, coordinator)
    if coordinator.mirror not in mirrors:
        raise StateError(f"run '{run.name}' does not list {coordinator.url} among its mirrors")
    assert reply.ticket is not None
    me = coordinator.identity.key
    check_ticket(
        reply.ticket,
        run=run.id,
        peer=me,
        mirrors=mirrors,
        revoked=frozenset(),
        now=0,
        orphaned=False,
    )
    folder.pin_spec(assigned)
    return JoinedRun(
        run=run.id,
        name=run.name,
        machine=machine,
        folder=folder,
        coordinator=coordinator,
        spec=spec,
        spec_digest=assigned,
        manifest=manifest,
        ticket=reply.ticket,
        directive=directive,
        acknowledged=reply.acknowledged,
        peers=tuple(reply.peers),
    )
