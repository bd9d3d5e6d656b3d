"""What a verdict is asked to retract or exclude: its parts, its checks, and the text to sign."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from pydantic import ValidationError

from barnraise.errors import SpecError
from barnraise.protocol import enums, verdicts
from barnraise.protocol.verdicts import MAX_AUTHORS, MAX_SINGLE_UPDATES, MAX_VERDICT_BYTES
from coordinator.fleet.witness_models import UpdateWitness, VouchedAuthor
from coordinator.lib import site_identity
from coordinator.replication import mirror_list, volunteer_salt
from coordinator.runs.models import Run

ACTIVE_STATUSES = (enums.RunStatus.RECRUITING, enums.RunStatus.TRAINING, enums.RunStatus.PAUSED)
MAX_EXCLUDED = 20  # people in one verdict
MAX_UPDATE_NUMBER = (1 << 53) - 1
AUTHOR = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}")


@dataclass(frozen=True)
class RetractionRequest:
    """What to retract of one author.

    Attributes:
        author: KEY.INCARNATION of a machine.
        first: retract its updates from this number on; None for no such range.
        updates: single updates to retract: number → the tokens it claims. With 0 tokens, where the
            number is unknown, the update's tokens stay in the run's count.
    """

    author: str
    first: int | None = None
    updates: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ExclusionRequest:
    """A volunteer to exclude from a run, with all machines."""

    person: Any
    # Of their updates, remove all that verdicts still reach; False: what they published so far
    # stays.
    remove_updates: bool = True


def parse_single_updates(text: str) -> dict[int, int]:
    """Parse "7, 9:40960" to number → tokens.

    Raises:
        SpecError: a part is not a number.
    """
    updates = {}
    for part in text.replace(",", " ").split():
        number, _, tokens = part.partition(":")
        is_numeric = (number + tokens).isdecimal() and part.isascii()
        if not is_numeric or not number or len(part) > 40:
            raise SpecError(
                {"updates": f"'{part[:40]}' is not a number, nor one with its tokens, like 7:40960"}
            )
        updates[int(number)] = int(tokens or 0)
    return updates


def signing_problem(run: Run) -> str:
    """Return why this site cannot sign verdicts on a run, as a sentence; "" if it can."""
    if run.state not in ACTIVE_STATUSES:
        return f"the run {run.name} is {run.status}: verdicts are for one that is under way"
    roots = run.spec.roots
    newest = mirror_list.list_of_run(roots)
    signers = newest.signers_at(newest.version) if newest else frozenset(roots)
    if site_identity.identity().key not in signers:
        return f"the rules of {run.name} do not list this site: its machines would not believe it"
    return ""


def retraction_problems(
    run: Run,
    requests: Sequence[RetractionRequest],
    exclude: Sequence[ExclusionRequest] = (),
    clear: Sequence[Any] = (),
) -> dict[str, str]:
    """Return why these requests cannot become a verdict: field → sentence."""
    problems: dict[str, str] = {}
    problem = signing_problem(run)
    if problem:
        problems["run"] = problem
    if exclude or clear:
        if any(item.person.pk == run.owner_id for item in exclude):
            problems["person"] = "the run's owner cannot be excluded from it"
        if len(exclude) + len(clear) > MAX_EXCLUDED:
            problems["person"] = f"name 1 to {MAX_EXCLUDED} people"
        if not requests:
            return problems
    if not 1 <= len(requests) <= MAX_AUTHORS:
        problems["author"] = f"name 1 to {MAX_AUTHORS} machines"
    for request in requests if not problems else ():
        problems |= _request_problems(run, request)
    return problems


def _request_problems(run: Run, request: RetractionRequest) -> dict[str, str]:
    key, _, incarnation = request.author.partition(".")
    member = None
    if AUTHOR.fullmatch(request.author):
        member = run.memberships.filter(machine__key=key).first()
    if member is None:
        return {"author": "name one incarnation of a machine of the run, as KEY.INCARNATION"}
    if request.first is None and not request.updates:
        return {"first": "say from which update on, or name single ones"}
    if request.first is not None and not 1 <= request.first <= MAX_UPDATE_NUMBER:
        return {"first": "updates are numbered from 1"}
    numbers_valid = all(1 <= number <= MAX_UPDATE_NUMBER for number in request.updates)
    if len(request.updates) > MAX_SINGLE_UPDATES or not numbers_valid:
        return {"updates": f"name at most {MAX_SINGLE_UPDATES}, each a number from 1"}
    max_tokens = run.spec.max_tokens_per_update
    if not all(0 <= tokens <= max_tokens for tokens in request.updates.values()):
        return {"updates": f"an update of this run has {max_tokens:,} tokens at most"}
    earliest = {
        "first": request.first or MAX_UPDATE_NUMBER,
        "updates": min(request.updates, default=MAX_UPDATE_NUMBER),
    }
    oldest = _oldest_retractable(run, member.machine_id, incarnation)
    for name, number in earliest.items():
        if number < oldest:
            return {
                name: f"update {number} is too old to come out: verdicts reach back "
                f"{run.spec.verdict_horizon} rounds, here to update {oldest}. "
                "Go on from a checkpoint before it, as a new run"
            }
    return {}


def _oldest_retractable(run: Run, machine: UUID, incarnation: str) -> int:
    """Estimate the first update of an author that machines must still have the payload of.

    Machines keep payloads for `verdict_horizon` rounds. A round is one update of everybody. What
    the author reports of itself counts for nothing, so that nobody can make themselves immune. Each
    witness shows up to which update the author was witnessed, and when: the rounds since then
    follow from the run's count. The least of these estimates counts.
    """
    vouched = VouchedAuthor.objects.filter(run=run, seq__gt=0).values_list("total", "seq")
    round_tokens = sum(total / seq for total, seq in vouched)
    if not round_tokens:
        return 0
    witnesses = UpdateWitness.objects.filter(run=run, machine=machine, incarnation=incarnation)
    estimates = [
        seq + max(0, run.ledger_tokens - run_tokens) / round_tokens
        for seq, run_tokens in witnesses.values_list("seq", "run_tokens")
    ]
    return math.ceil(min(estimates, default=0) - run.spec.verdict_horizon)


def build_verdict(
    run: Run,
    requests: Sequence[RetractionRequest],
    exclude: Sequence[ExclusionRequest],
    reason: str,
    clear: Sequence[Any] = (),
) -> verdicts.Verdict:
    """Build the verdict that these requests ask for.

    Raises:
        SpecError: the reason or the whole verdict is too long.
    """
    newest = mirror_list.list_of_run(run.spec.roots)
    keys: dict[str, dict[str, int]] = {}
    volunteers: dict[str, dict[str, int]] = {}
    for item in exclude:
        kept = _kept_updates(run, item)
        volunteers[volunteer_salt.volunteer_pseudonym(item.person.pk)] = kept
        for key in item.person.machines.values_list("key", flat=True)[:MAX_AUTHORS]:
            keys[key] = {author: last for author, last in kept.items() if author.startswith(key)}
    try:
        verdict = verdicts.Verdict(
            run=str(run.pk),
            keys=keys,
            volunteers=volunteers,
            cleared=[volunteer_salt.volunteer_pseudonym(person.pk) for person in clear],
            mirror_list_version=newest.version if newest else 0,
            after={item.author: item.first - 1 for item in requests if item.first},
            updates={item.author: dict(item.updates) for item in requests if item.updates},
            reason=reason.strip(),
            issued=time.time(),
        )
    except ValidationError:
        raise SpecError({"reason": "say why in 100 characters or fewer, on one line"}) from None
    if len(verdict.model_dump_json().encode()) > MAX_VERDICT_BYTES:
        problem = "a verdict has a limit of {:,} bytes: decide on fewer machines or updates at once"
        raise SpecError({"author": problem.format(MAX_VERDICT_BYTES)})
    return verdict


def _kept_updates(run: Run, exclusion: ExclusionRequest) -> dict[str, int]:
    """Return author → the last update that stays, of those of an excluded volunteer.

    No number is beyond what others have seen: an excluded volunteer's later updates up to it would
    count, from any peer that passes them on.
    """
    kept: dict[str, int] = {}
    for machine, key, incarnation, reported in _list_authors_of(run, exclusion.person):
        updates = _published_updates(run, machine, incarnation, reported)
        if exclusion.remove_updates:
            oldest = _oldest_retractable(run, machine, incarnation)
            updates = max(0, min(updates, oldest - 1))
        if updates and len(kept) < MAX_AUTHORS:
            kept[f"{key}.{incarnation}"] = updates
    return kept


def _list_authors_of(run: Run, person: Any) -> list[tuple[UUID, str, str, int]]:
    """List the (machine, key, incarnation, updates that it reports) of a person in a run.

    Incarnations that others vouch for come first, reported or not: nobody can hide old updates,
    which machines could not take out any longer, by reporting under another name.
    """
    authors: dict[tuple[UUID, str, str], int] = {}
    vouched = VouchedAuthor.objects.filter(run=run, machine__owner=person).order_by("-seq", "pk")
    for machine, key, incarnation in vouched.values_list("machine", "machine__key", "incarnation"):
        authors[machine, key, incarnation] = 0
    members = run.memberships.filter(machine__owner=person).select_related("machine")
    for member in members.order_by("-last_seen"):
        for incarnation, updates in member.updates_by_incarnation.items():
            authors[member.machine_id, member.machine.key, incarnation] = updates
    return [(*author, updates) for author, updates in authors.items()]


def _published_updates(run: Run, machine: UUID, incarnation: str, reported: int) -> int:
    """Return how many updates of an author there are, as far as others have seen them.

    What the author reports counts only in a run in which nobody has witnessed anything of it.
    """
    of_run = VouchedAuthor.objects.filter(run=run, seq__gt=0)
    vouched = of_run.filter(machine=machine, incarnation=incarnation).first()
    if vouched is not None:
        return vouched.seq
    if of_run.exists():
        return 0
    witnesses = UpdateWitness.objects.filter(run=run, machine=machine, incarnation=incarnation)
    return max(witnesses.values_list("seq", flat=True), default=reported)
