"""Join a run: obtain its spec, its text's manifest, a ticket and a locked folder.

While a run is a draft, the coordinator may tell its owner's machine to prepare the text; all other
machines wait for the launch. A machine that holds a ticket can join without any coordinator, from
the answer that its folder stores.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError

from barnraise.coordinator_client.failover import FailoverClient
from barnraise.errors import (
    CoordinatorError,
    CoordinatorUnreachableError,
    MessageError,
    RunEndedError,
    StateError,
    UnsupportedModelError,
)
from barnraise.ledger.blob_store import BlobStore
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.lines import HOME_LINE
from barnraise.planning.speedup import estimate_speedup
from barnraise.planning.write_advice import PlanRequest
from barnraise.protocol.coordinator_messages import (
    Directive,
    JoinReply,
    ModelShape,
    RunView,
    TextManifest,
)
from barnraise.protocol.enums import JoinPurpose, RunStatus, SigningRight
from barnraise.protocol.messages import Peer, Signed
from barnraise.protocol.polling import NETWORK_POLL_SECONDS
from barnraise.protocol.reports import HardwareView
from barnraise.protocol.signing import M, TicketPolicy, check_ticket, digest, open_signed
from barnraise.spec import ModelSpec, RunSpec, adopt_model
from barnraise.state_dir import JOIN_REPLY_FILE, RunDir, SiteMembership, StateDir
from barnraise.training.local_control import LocalControl
from barnraise.training.preparation import TextPreparation, build_text, plan_text

log = logging.getLogger("barnraise")

# In a run's folder, for times when no coordinator answers: the last directive that revoked a peer,
# which stays out meanwhile.
DIRECTIVE_FILE = "directive.json"
# The pause between two requests for a draft grows with each, up to the time between two reports.
POLL_GROWTH = 1.2
MAX_GROWTHS = 60  # after which it is longer than any time between two reports
CONFIRMATION_POLL_SECONDS = 8.0  # the longest pause while its owner confirms a machine
RETRY_SECONDS = 30.0  # between two attempts to get the weights that a draft begins with
SITE_WAIT_SECONDS = 600.0  # for a site that restarts while a machine without a ticket starts
SITE_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class JoinedRun:
    """This machine's part in a launched run."""

    run: str
    name: str
    machine: str  # this machine's id at the coordinator
    folder: RunDir  # the run's locked folder
    coordinator: FailoverClient
    spec: RunSpec  # the run's rules
    spec_digest: str  # digest of the spec's exact text
    manifest: TextManifest  # of the run's text
    ticket: Signed  # this machine's permission to take part
    directive: Directive  # the coordinator's last one
    acknowledged: int  # number of this machine's last report that the coordinator stored
    peers: tuple[Peer, ...]  # peers to connect to first
    signed_directive: Signed | None = None  # the directive as it was received
    # Whether to start at weights that only the connected volunteers confirm, even a single one.
    trust_one: bool = False
    # The IP address from which the coordinator receives this machine's requests.
    source_ip: str = ""

    def describe_gain(self, tokens_per_second: float) -> str:
        """Return how much sooner the run ends with the machines it has, by their number.

        All are assumed to train as fast as this one, on home lines; "" with no other machine.
        """
        machines = len(self.peers) + 1
        return estimate_speedup(self.spec, tokens_per_second, HOME_LINE, machines).sentence

    def request_plan(self, hardware: Hardware, limits: Limits) -> PlanRequest:
        """Return what a plan of this run is made for on a machine."""
        recipe = self.spec.recipe
        return PlanRequest(
            hardware, self.spec.model, limits, recipe.step_sequences, recipe.optimizer
        )


@dataclass(frozen=True)
class InitialWeights:
    """The weights of another run or of a Hugging Face model, stored as blobs."""

    fragments: Sequence[str] = ()  # each fragment's digest
    # Content of the other run's or model's tokenizer file; None for bytes.
    tokenizer: bytes | None = None
    model: ModelSpec | None = None  # the architecture of a Hugging Face model, which the run adopts


# Obtains the weights that a spec begins with, or raises StateError. The second argument stores a
# blob and returns its digest.
WeightsSource = Callable[[RunSpec, Callable[[bytes | memoryview], str]], InitialWeights]


def join_run(
    home: StateDir,
    name: str,
    leaving: threading.Event,
    hardware: HardwareView | None = None,
    weights: WeightsSource | None = None,
    purpose: JoinPurpose = JoinPurpose.TRAIN,
) -> JoinedRun | None:
    """Join a run, once it is launched.

    Args:
        home: this machine's state directory.
        name: the run's id or slug.
        leaving: interrupts the wait for the launch.
        hardware: what the coordinator is told of this machine.
        weights: obtains the weights of another run, if this run begins with them.
        purpose: whether this machine trains, trains in a crew or downloads the weights.

    Returns:
        None when `leaving` was set before the launch.

    Raises:
        StateError, CoordinatorError, MessageError: with a sentence for the user. While no site
            answers, a machine without a ticket first waits for `SITE_WAIT_SECONDS`.
    """
    membership = home.membership
    coordinator = FailoverClient.from_state_dir(home)
    run = _find_run_id(home, coordinator, name, leaving)
    if run is None:
        return None
    folder = home.open_run(run)
    try:
        control = LocalControl(folder.path)
        control.register_worker(trains=purpose is not JoinPurpose.FETCH)
        control.watch_stop(folder, leaving)
        reply = _wait_for_site(
            lambda: _request_join(coordinator, folder, run, hardware, purpose), leaving
        )
        if reply is None:
            folder.close()
            return None
        attempt = 0
        logged_reason = ""
        while reply.ticket is None:
            reason = describe_wait(reply, _confirmation_page(coordinator, membership))
            if reason != logged_reason:
                log.info("%s", reason)
                logged_reason = reason
            attempt, pause = _handle_draft(coordinator, folder, reply, weights, attempt)
            if leaving.wait(pause):
                folder.close()
                return None
            try:
                reply = _request_join(coordinator, folder, run, hardware, purpose)
            except CoordinatorUnreachableError as error:
                log.warning("%s; still waiting for the launch", error)
        return _verify_join(reply, folder, coordinator, membership.machine)
    except BaseException:
        folder.close()
        raise


def _find_run_id(
    home: StateDir, coordinator: FailoverClient, name: str, leaving: threading.Event
) -> str | None:
    """Return the id of a run, from the site or a saved ticket; None when `leaving` was set."""
    try:
        return coordinator.fetch_run(name).id
    except CoordinatorUnreachableError as error:
        saved_run = find_saved_run(home, name)
        if saved_run is not None:
            log.warning("%s; going on with the ticket this machine holds", error)
            return saved_run.id
    view = _wait_for_site(lambda: coordinator.fetch_run(name), leaving)
    return view and view.id


def _wait_for_site(request: Callable[[], M], leaving: threading.Event) -> M | None:
    """Repeat a request while no site answers; return None when `leaving` was set.

    Raises:
        CoordinatorUnreachableError: None answered for `SITE_WAIT_SECONDS`.
    """
    deadline = time.monotonic() + SITE_WAIT_SECONDS
    while True:
        try:
            return request()
        except CoordinatorUnreachableError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            log.warning("%s; trying again for %.0f s", error, left)
        if leaving.wait(min(SITE_POLL_SECONDS, left)):
            return None


def describe_wait(reply: JoinReply, confirmation_page: str) -> str:
    """Return what a machine without a ticket waits for, and where its owner confirms it. Pure."""
    run = reply.run
    if run.manifest is None and reply.signing is SigningRight.UNCONFIRMED:
        spec = RunSpec.from_json(run.spec)
        files = " TEXT" if spec.text.source == "files" else ""
        files += " --model FOLDER" if spec.start.model == "folder" else ""
        if files:
            return (
                f"'{run.name}' waits for its text: `barnraise prepare {run.slug or run.id}{files}` "
                "prepares it, on the machine that has the files"
            )
        return (
            f"'{run.name}' waits for its text. This machine prepares it once you confirm at "
            f"{confirmation_page} that it may sign for your runs"
        )
    if run.launching and reply.signing is SigningRight.ALLOWED:
        return f"'{run.name}' is launched: one of your machines prepares its text"
    if run.launching:
        return f"'{run.name}' is launched: waiting for a machine of its owner to prepare the text"
    return f"'{run.name}' is not launched yet: waiting for its owner"


def _handle_draft(
    coordinator: FailoverClient,
    folder: RunDir,
    reply: JoinReply,
    weights: WeightsSource | None,
    attempt: int,
) -> tuple[int, float]:
    """Prepare a draft's text, if the coordinator wants it.

    Returns:
        The number of the next request since the last change, and the seconds to wait before it.
    """
    directive = _open_directive(reply, coordinator)
    _check_not_ended(reply)
    if directive.prepare and not reply.run.manifest:
        if not _post_text(coordinator, folder, reply, weights):
            return 0, max(RETRY_SECONDS, directive.report_every)
        attempt = 0
    return attempt + 1, draft_pause(attempt, directive.report_every)


def draft_pause(attempt: int, report_every: float) -> float:
    """Return the seconds between two requests for a draft: few while its owner acts. Pure."""
    longest = max(NETWORK_POLL_SECONDS, report_every)
    return min(longest, NETWORK_POLL_SECONDS * POLL_GROWTH ** min(attempt, MAX_GROWTHS))


def prepare_text(
    home: StateDir,
    name: str,
    preparation: TextPreparation,
    weights: WeightsSource | None = None,
    replaces: bool = False,
) -> RunView:
    """Prepare a draft's text on this machine, and post its manifest.

    A text that was prepared before gives way only if this one replaces it.

    The shards stay in the run's folder; a worker on this machine sends them to the others.

    Raises:
        BarnraiseError: The text cannot be prepared, or is prepared already.
    """
    coordinator = FailoverClient.from_state_dir(home)
    view = coordinator.fetch_run(name)
    draft = RunSpec.from_json(view.spec)
    if preparation.paths and draft.text.source != "files":
        raise StateError(
            f"the text of '{view.name}' does not come from files: "
            "`barnraise prepare RUN` without paths prepares it"
        )
    if view.manifest is not None and not replaces:
        raise StateError(describe_text(view))
    folder = home.open_run(view.id)
    try:
        # What the site would refuse is refused before anything is read.
        page = _confirmation_page(coordinator, home.membership)
        reply = _wait_for_confirmation(coordinator, folder, view.id, page)
        _check_not_ended(reply)
        if view.manifest is not None:
            _discard_text(coordinator, folder, view)
        if not _post_text(coordinator, folder, reply, weights, preparation):
            raise StateError(
                f"the text of '{view.name}' waits for the weights it begins with: try again"
            )
        return coordinator.fetch_run(view.id)
    finally:
        folder.close()


def _confirmation_page(coordinator: FailoverClient, membership: SiteMembership) -> str:
    """Return the address where a machine's owner confirms it, at the mirror that answers now."""
    return f"{coordinator.url}/machines/{membership.machine}/#confirm"


def _wait_for_confirmation(
    coordinator: FailoverClient, folder: RunDir, run: str, page: str
) -> JoinReply:
    """Request to join a run, until its owner has confirmed this machine at the page.

    Raises:
        StateError: the run is somebody else's.
    """
    reply = _request_join(coordinator, folder, run, None)
    if reply.signing is SigningRight.UNCONFIRMED:
        log.warning(
            "confirm at %s that this machine (key %s) may sign for your runs; this command then "
            "continues",
            page,
            coordinator.identity.key,
        )
    attempt = 0
    while reply.signing is SigningRight.UNCONFIRMED:
        time.sleep(draft_pause(attempt, CONFIRMATION_POLL_SECONDS))
        attempt += 1
        try:
            reply = _request_join(coordinator, folder, run, None)
        except CoordinatorUnreachableError as error:
            log.warning("%s; still waiting", error)
    if reply.signing is SigningRight.REFUSED:
        raise StateError(f"only a machine of the owner of '{reply.run.name}' prepares its text")
    return reply


def describe_text(view: RunView) -> str:
    """Describe the text that a run has, and what its owner can do about it."""
    tokens = sum(shard.tokens for shard in open_manifest(view).train)
    sentence = f"the run '{view.name}' has its text already, of {tokens:,} tokens"
    if view.status is RunStatus.DRAFT:
        return f"{sentence}: --replace prepares another one in its place"
    return f"{sentence}, and it is launched: copy the run to train on another text"


def _discard_text(coordinator: FailoverClient, folder: RunDir, view: RunView) -> None:
    """Discard the text of a draft, at the site and on this machine."""
    manifest = open_manifest(view)
    coordinator.discard_manifest(view.id)
    blobs = BlobStore(folder.path / "blobs")
    for shard in (*manifest.train, *manifest.held_out):
        blobs.delete(shard.digest)


def open_manifest(view: RunView) -> TextManifest:
    """Return the manifest of a run's text, as its owner's machine signed it.

    Raises:
        MessageError: The text is not prepared yet, or the signature is wrong.
    """
    if view.manifest is None:
        raise MessageError(f"the text of '{view.name}' is not prepared yet")
    return open_signed(view.manifest, "manifest", TextManifest)


def find_saved_run(home: StateDir, name: str) -> RunView | None:
    """Find a run, by id or slug, for which this machine has had a ticket."""
    for path in home.run_folders():
        reply_path = path / JOIN_REPLY_FILE
        if reply_path.exists():
            view = _load_message(reply_path, JoinReply).run
            if name in (view.id, view.slug):
                return view
    return None


def _request_join(
    coordinator: FailoverClient,
    folder: RunDir,
    run: str,
    hardware: HardwareView | None,
    purpose: JoinPurpose = JoinPurpose.TRAIN,
) -> JoinReply:
    """Request to join; without a coordinator, return the stored answer."""
    try:
        reply = coordinator.join_run(run, [], hardware, purpose)
    except CoordinatorUnreachableError:
        reply_path = folder.path / JOIN_REPLY_FILE
        directive_path = folder.path / DIRECTIVE_FILE
        if not reply_path.exists():
            raise
        stored_reply = _load_message(reply_path, JoinReply)
        if not directive_path.exists():
            return stored_reply
        directive = _load_message(directive_path, Signed)
        return stored_reply.model_copy(update={"directive": directive})
    if reply.ticket:
        # The network may be another one at the next join.
        folder.save_message(JOIN_REPLY_FILE, reply.model_copy(update={"source_ip": None}))
    return reply


def _load_message(path: Path, shape: type[M]) -> M:
    try:
        return shape.model_validate_json(path.read_bytes())
    except ValidationError:
        raise StateError(
            f"{path} is damaged: remove it, and join while the coordinator answers"
        ) from None


def _post_text(
    coordinator: FailoverClient,
    folder: RunDir,
    reply: JoinReply,
    weights: WeightsSource | None,
    preparation: TextPreparation | None = None,
) -> bool:
    """Build a draft's text in the folder's blob store, and post its manifest.

    Returns:
        False when the weights that the run begins with cannot be had now; the log says why.
    """
    draft = RunSpec.from_json(reply.run.spec)
    preparation = preparation or TextPreparation()
    tokenizer_file = preparation.tokenizer.file if preparation.tokenizer else None
    initial_weights = InitialWeights()
    blobs = BlobStore(folder.path / "blobs")
    if draft.start.has_weights:
        assert weights is not None, "a machine that may be told to prepare can get the weights"
        try:
            initial_weights = weights(draft, blobs.store)
        except UnsupportedModelError:
            raise
        except StateError as error:
            log.warning(
                "the weights that '%s' begins with cannot be had now: %s", reply.run.name, error
            )
            return False
        tokenizer_file = initial_weights.tokenizer
        if initial_weights.model is not None:
            draft = adopt_model(draft, initial_weights.model)
    log.info("preparing the text: source %s, tokenizer %s", draft.text.source, draft.text.tokenizer)
    plan = plan_text(draft, reply.run.id, tokenizer_file)
    manifest = build_text(folder.path, plan, preparation, blobs.store)
    manifest = manifest.model_copy(
        update={
            "start": list(initial_weights.fragments),
            "model": initial_weights.model and ModelShape(**asdict(initial_weights.model)),
        }
    )
    try:
        coordinator.submit_manifest(reply.run.id, manifest)
    except CoordinatorUnreachableError as error:
        log.warning("%s; the manifest goes out on the next try", error)
    except CoordinatorError as error:
        if error.status != 409:  # another machine of the owner has posted one already
            raise
    return True


def _check_not_ended(reply: JoinReply) -> None:
    if reply.run.status in (RunStatus.FINISHED, RunStatus.CANCELLED):
        raise RunEndedError(
            f"the run '{reply.run.name}' is {reply.run.status}: there is nothing to train"
        )


def _open_directive(reply: JoinReply, coordinator: FailoverClient) -> Directive:
    """Open the directive. A stored one may be signed by another mirror than the current one.

    Raises:
        MessageError: None of this machine's mirrors signed it.
    """
    if reply.directive.key not in coordinator.keys:
        raise MessageError(
            f"the directive is signed by {reply.directive.key[:8]}, not a mirror of this machine's"
        )
    return open_signed(reply.directive, "directive", Directive)


def _ticket_mirrors(spec: RunSpec, coordinator: FailoverClient) -> frozenset[str]:
    """Return the mirrors whose tickets are valid in the run.

    They are the run's own mirrors and, where one of them is on the mirror list, all on the list.
    """
    roots = frozenset(spec.roots)
    newest = coordinator.newest_list
    return roots | newest.keys if newest and roots & newest.keys else roots


def _verify_join(
    reply: JoinReply, folder: RunDir, coordinator: FailoverClient, machine: str
) -> JoinedRun:
    """Verify by digest and signature that spec, manifest, ticket and directive belong together."""
    run = reply.run
    spec_digest = digest(run.spec)
    spec = RunSpec.from_json(run.spec)
    if run.manifest is None or digest(run.manifest.body) != spec.manifest:
        raise MessageError(f"the manifest of run '{run.name}' is not the one its spec names")
    manifest = open_signed(run.manifest, "manifest", TextManifest, spec.owner)
    if manifest.run != run.id:
        raise MessageError(f"the manifest of run '{run.name}' was made for another run")
    directive = _open_directive(reply, coordinator)
    if directive.run != run.id or directive.machine != machine:
        raise MessageError(
            f"the coordinator's directive is for another machine or run than '{run.name}'"
        )
    mirrors = _ticket_mirrors(spec, coordinator)
    if coordinator.mirror not in mirrors:
        raise StateError(f"run '{run.name}' does not list {coordinator.url} among its mirrors")
    assert reply.ticket is not None
    # The ticket may have expired: the peers decide that. A fresh one comes with a report's answer.
    check_ticket(reply.ticket, coordinator.identity.key, TicketPolicy(run.id, mirrors), now=0)
    folder.pin_spec(spec_digest)
    return JoinedRun(
        run=run.id,
        name=run.name,
        machine=machine,
        folder=folder,
        coordinator=coordinator,
        spec=spec,
        spec_digest=spec_digest,
        manifest=manifest,
        ticket=reply.ticket,
        directive=directive,
        acknowledged=reply.acknowledged,
        peers=tuple(reply.peers),
        signed_directive=reply.directive,
        source_ip=reply.source_ip or "",
    )
