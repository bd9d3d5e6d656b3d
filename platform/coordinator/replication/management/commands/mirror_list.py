"""Propose, sign and publish the mirror list.

keygen FILE                          create a root key, for a disk that stays offline
begin, add, expel, renew, roots      write a proposal: the next list, unsigned
sign FILE --key KEY                  add one root's signature to a proposal
publish FILE                         put a signed list into force, here and at all other mirrors
show [FILE]                          print a list and its signatures
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from pydantic import ValidationError

from barnraise.errors import MirrorListError
from barnraise.protocol.mirror_list import (
    Expulsion,
    MirrorEntry,
    MirrorList,
    SignedMirrorList,
    add_signature,
    parse_list,
    unsigned_list,
)
from barnraise.protocol.signing import Identity
from coordinator.eventlog.models import Origin
from coordinator.lib import site_identity
from coordinator.lib.environment import parse_origin
from coordinator.lib.exceptions import UserError
from coordinator.replication import mirror_list

DEFAULT_DAYS = 180  # until a list expires
MIN_KEY_CHARS = 8  # of a key that is named by its beginning


class Command(BaseCommand):
    """Run one step of changing the mirror list."""

    help = __doc__ or ""
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare one subcommand for each step."""
        actions = parser.add_subparsers(dest="action", required=True)

        def add_action(name: str, help_text: str) -> CommandParser:
            return actions.add_parser(name, help=help_text)

        def add_proposal(name: str, help_text: str) -> CommandParser:
            action = add_action(name, help_text)
            action.add_argument(
                "--to", type=Path, default=Path("mirrors.json"), help="the proposal's file"
            )
            action.add_argument(
                "--days", type=float, default=DEFAULT_DAYS, help="days until the list expires"
            )
            return action

        add_action("keygen", "create a root key").add_argument("file", type=Path)
        begin = add_proposal("begin", "propose the first list, with this site in it")
        begin.add_argument("--url", required=True, help="this site's address")
        begin.add_argument("--name", required=True, help="this site's name")
        roots = add_proposal("roots", "propose other roots")
        for action in (begin, roots):
            action.add_argument(
                "--root", action="append", required=True, metavar="KEY", help="a public root key"
            )
            action.add_argument(
                "--threshold", type=int, required=True, help="how many of them must sign"
            )
        add = add_proposal("add", "propose another mirror")
        for name in ("--key", "--url", "--name"):
            add.add_argument(name, required=True)
        expel = add_proposal("expel", "propose to expel a mirror")
        expel.add_argument("--key", required=True, help="its key, or the beginning of it")
        expel.add_argument(
            "--last",
            action="append",
            default=[],
            metavar="LOG:NUMBER",
            help="the last event of a log that still counts",
        )
        expel.add_argument("--reason", default="")
        add_proposal("renew", "propose the same list with a later expiry")
        sign = add_action("sign", "add a root's signature")
        sign.add_argument("file", type=Path)
        sign.add_argument("--key", type=Path, required=True, help="the root key's file")
        publish = add_action("publish", "put a signed list into force")
        publish.add_argument("file", type=Path)
        publish.add_argument(
            "--first", action="store_true", help="this is our own list and the first one here"
        )
        add_action("show", "print a list").add_argument("file", type=Path, nargs="?")

    def handle(self, *, action: str, **options: Any) -> None:
        """Run the step; report errors as one sentence."""
        steps: dict[str, Callable[..., None]] = {
            "keygen": self._create_key,
            "sign": self._sign,
            "begin": self._propose_first,
            "roots": self._change_roots,
            "add": self._add,
            "expel": self._expel,
            "renew": self._renew,
            "publish": self._publish,
            "show": self._show,
        }
        try:
            if "url" in options:
                options["url"] = parse_origin(options["url"])
            steps[action](**options)
        except (MirrorListError, UserError, OSError) as error:
            raise CommandError(str(error)) from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise CommandError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    # ---- on an offline machine

    def _create_key(self, file: Path, **_: Any) -> None:
        if file.exists():
            raise CommandError(f"{file} exists: a root key is never written over")
        self.stdout.write(Identity.load_or_create(file).key)

    def _sign(self, file: Path, key: Path, **_: Any) -> None:
        if not key.exists():
            raise CommandError(f"there is no key at {key}")
        try:
            root = Identity(key.read_bytes())
        except ValueError:
            raise CommandError(f"{key} is not a key that keygen created") from None
        signed = add_signature(root, _load(file))
        _save(file, signed)
        self._print_list(signed)

    # ---- proposals

    def _propose_first(
        self, url: str, name: str, root: list[str], threshold: int, **options: Any
    ) -> None:
        own_key = site_identity.identity().key
        own = MirrorEntry(key=own_key, url=url, name=name, admitted=time.time())
        first = MirrorList(
            version=1, expires=time.time(), threshold=threshold, roots=root, mirrors=[own]
        )
        self._propose(first, **options)

    def _change_roots(self, root: list[str], threshold: int, **options: Any) -> None:
        proposal = _next_version(options["to"])
        changed = proposal.model_copy(update={"roots": root, "threshold": threshold})
        self._propose(changed, **options)

    def _add(self, key: str, url: str, name: str, **options: Any) -> None:
        proposal = _next_version(options["to"])
        entry = MirrorEntry(
            key=key, url=url, name=name, admitted=time.time(), since=proposal.version
        )
        mirrors = [*proposal.mirrors, entry]
        self._propose(proposal.model_copy(update={"mirrors": mirrors}), **options)

    def _expel(self, key: str, last: list[str], reason: str, **options: Any) -> None:
        proposal = _next_version(options["to"])
        matching = [entry for entry in proposal.active if entry.key.startswith(key)]
        if len(matching) != 1 or len(key) < MIN_KEY_CHARS:
            raise CommandError(
                f"'{key}' is not one mirror of list {proposal.version}: give eight digits at least"
            )
        expulsion = Expulsion(
            at=time.time(), since=proposal.version, last=_parse_last(last), reason=reason
        )
        mirrors = [
            entry.model_copy(update={"expelled": expulsion}) if entry is matching[0] else entry
            for entry in proposal.mirrors
        ]
        self._propose(proposal.model_copy(update={"mirrors": mirrors}), **options)

    def _renew(self, **options: Any) -> None:
        self._propose(_next_version(options["to"]), **options)

    def _propose(self, proposal: MirrorList, to: Path, days: float, **_: Any) -> None:
        if not days > 0:
            raise CommandError("--days: a list that has expired binds nobody; write 1 or more")
        expires = time.time() + days * 86_400
        changes = {"expires": expires, "relays": settings.RELAYS}
        validated = MirrorList.model_validate(proposal.model_dump() | changes)
        unsigned = unsigned_list(validated)
        parse_list(unsigned)
        _save(to, unsigned)
        self._print_list(unsigned)
        self.stdout.write(
            f"Proposed in {to}: have {validated.threshold} roots sign it, then publish it."
        )

    # ---- at this site

    def _publish(self, file: Path, first: bool, **_: Any) -> None:
        newest = mirror_list.publish(_load(file), first=first)
        self.stdout.write(
            f"Mirror list {newest.version} is in force here; the other mirrors and all machines "
            "will receive it."
        )

    def _show(self, file: Path | None, **_: Any) -> None:
        if file:
            self._print_list(_load(file))
            return
        chain = mirror_list.signed_chain()
        if not chain:
            raise CommandError("there is no mirror list here: begin one")
        self._print_list(chain[-1])
        for origin in Origin.objects.all():
            end = ""
            if origin.last_valid_seq is not None:
                end = f", truncated after {origin.last_valid_seq}: {origin.truncation_reason}"
            self.stdout.write(
                f"  log {origin.pk} of {origin.key[:16]}: {origin.head_seq} events{end}"
            )

    def _print_list(self, signed: SignedMirrorList) -> None:
        parsed = parse_list(signed)
        expiry = time.strftime("%Y-%m-%d", time.gmtime(parsed.expires))
        self.stdout.write(f"Mirror list {parsed.version}, until {expiry}, BLAKE3 {signed.digest}")
        for entry in parsed.mirrors:
            expelled = f" (expelled: {entry.expelled.reason})" if entry.expelled else ""
            self.stdout.write(f"  mirror {entry.key[:16]} {entry.url} {entry.name}{expelled}")
        self.stdout.write(f"  relays: {', '.join(parsed.relays) or 'none'}")
        for key in parsed.roots:
            self.stdout.write(f"  root {key}{' has signed' if key in signed.signatures else ''}")
        self.stdout.write(f"  {parsed.threshold} of {len(parsed.roots)} roots must sign")


def _parse_last(arguments: list[str]) -> dict[str, int]:
    """Parse `LOG:NUMBER` arguments."""
    last = {}
    for argument in arguments:
        log, _, number = argument.rpartition(":")
        if not number.isdecimal():
            raise CommandError("--last is LOG:NUMBER, as `show` lists them")
        last[log] = int(number)
    return last


def _next_version(proposal: Path) -> MirrorList:
    """Return the proposal in this file, to be changed further, or the list in force plus one."""
    in_force = mirror_list.newest_list()
    if proposal.exists():
        proposed = parse_list(_load(proposal))
        if in_force is None or proposed.version > in_force.version:
            return proposed
    if in_force is None:
        raise CommandError("there is no mirror list here: begin one")
    return in_force.model_copy(update={"version": in_force.version + 1})


def _save(file: Path, signed: SignedMirrorList) -> None:
    unfinished = file.with_name(file.name + ".new")
    unfinished.write_text(signed.model_dump_json(indent=1))
    unfinished.replace(file)


def _load(file: Path) -> SignedMirrorList:
    try:
        return SignedMirrorList.model_validate_json(file.read_bytes())
    except ValidationError:
        raise CommandError(f"{file} is not a mirror list") from None
