"""manage.py mirror_list: the mirror list, from keys to publication.

keygen FILE           a root's key, for a disk that is offline
begin · add · expel · renew · roots    write a proposal: the next list, unsigned
sign FILE --key KEY   adds one root's signature to it
publish FILE          this site takes it, and with it all others and their machines
show [FILE]           what a list says, and who signed it
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from pydantic import ValidationError

from barnraise.errors import ListError
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
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError

DAYS = 180  # a list counts for so long, if nothing else is said


class Command(BaseCommand):
    help = __doc__
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True)

        def verb(name: str, about: str, proposes: bool = False) -> CommandParser:
            made = verbs.add_parser(name, help=about)
            if proposes:
                made.add_argument(
                    "--to", type=Path, default=Path("mirrors.json"), help="the proposal's file"
                )
                made.add_argument("--days", type=float, default=DAYS, help="until it expires")
            return made

        verb("keygen", "make a root's key").add_argument("file", type=Path)
        begin = verb("begin", "propose the first list, with this site in it", proposes=True)
        begin.add_argument("--url", required=True, help="where this site is")
        begin.add_argument("--name", required=True)
        for each in (begin, verb("roots", "propose other roots", proposes=True)):
            each.add_argument(
                "--root", action="append", required=True, metavar="KEY", help="a public key"
            )
            each.add_argument(
                "--threshold", type=int, required=True, help="how many of them must sign"
            )
        add = verb("add", "propose another mirror", proposes=True)
        for name in ("--key", "--url", "--name"):
            add.add_argument(name, required=True)
        expel = verb("expel", "propose that a mirror goes", proposes=True)
        expel.add_argument("--key", required=True, help="its key, or how that begins")
        expel.add_argument(
            "--last",
            action="append",
            default=[],
            metavar="LOG:NUMBER",
            help="what still counts of it",
        )
        expel.add_argument("--reason", default="")
        verb("renew", "propose the same list for longer", proposes=True)
        sign = verb("sign", "add a root's signature")
        sign.add_argument("file", type=Path)
        sign.add_argument(
            "--key", type=Path, required=True, help="the root's key, as keygen made it"
        )
        publish = verb("publish", "take a signed list here")
        publish.add_argument("file", type=Path)
        publish.add_argument(
            "--first", action="store_true", help="there is none here yet, and this is ours"
        )
        verb("show", "what a list says").add_argument("file", type=Path, nargs="?")

    def handle(self, *, verb: str, **options: Any) -> None:
        act: Callable[..., None] = getattr(self, verb)
        try:
            act(**options)
        except (ListError, UserError, OSError) as error:
            raise CommandError(str(error)) from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise CommandError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    # ---- where there is no network

    def keygen(self, file: Path, **_: Any) -> None:
        if file.exists():
            raise CommandError(f"{file} exists: a root's key is never written over")
        self.stdout.write(Identity.load_or_create(file).key)

    def sign(self, file: Path, key: Path, **_: Any) -> None:
        if not key.exists():
            raise CommandError(f"there is no key at {key}")
        try:
            root = Identity(key.read_bytes())
        except ValueError:
            raise CommandError(f"{key} is not a key of keygen's") from None
        signed = add_signature(root, _load(file))
        _keep(file, signed)
        self._tell(signed)

    # ---- proposals

    def begin(self, url: str, name: str, root: list[str], threshold: int, **options: Any) -> None:
        own = MirrorEntry(
            key=site_identity.identity().key, url=url, name=name, admitted=time.time()
        )
        found = MirrorList(
            version=1, expires=time.time(), threshold=threshold, roots=root, mirrors=[own]
        )
        self._propose(found, **options)

    def roots(self, root: list[str], threshold: int, **options: Any) -> None:
        self._propose(
            _next(options["to"]).model_copy(update={"roots": root, "threshold": threshold}),
            **options,
        )

    def add(self, key: str, url: str, name: str, **options: Any) -> None:
        before = _next(options["to"])
        mirrors = [*before.mirrors, MirrorEntry(key=key, url=url, name=name, admitted=time.time())]
        self._propose(before.model_copy(update={"mirrors": mirrors}), **options)

    def expel(self, key: str, last: list[str], reason: str, **options: Any) -> None:
        before = _next(options["to"])
        found = [each for each in before.active if each.key.startswith(key)]
        if len(found) != 1 or len(key) < 8:
            raise CommandError(
                f"'{key}' is not one mirror of list {before.version}: give eight digits at least"
            )
        pairs = [each.rpartition(":") for each in last]
        if not all(number.isdecimal() for _, _, number in pairs):
            raise CommandError("--last is LOG:NUMBER, as `show` lists them")
        gone = Expulsion(
            at=time.time(), last={log: int(number) for log, _, number in pairs}, reason=reason
        )
        mirrors = [
            each.model_copy(update={"expelled": gone}) if each.key == found[0].key else each
            for each in before.mirrors
        ]
        self._propose(before.model_copy(update={"mirrors": mirrors}), **options)

    def renew(self, **options: Any) -> None:
        self._propose(_next(options["to"]), **options)

    def _propose(self, found: MirrorList, to: Path, days: float, **_: Any) -> None:
        found = MirrorList.model_validate(
            found.model_dump() | {"expires": time.time() + days * 86_400}
        )
        signed = unsigned_list(found)
        parse_list(signed)
        _keep(to, signed)
        self._tell(signed)
        self.stdout.write(
            f"Proposed in {to}: have {found.threshold} roots sign it, then publish it."
        )

    # ---- here

    def publish(self, file: Path, first: bool, **_: Any) -> None:
        from coordinator.replication import mirror_list

        found = mirror_list.publish(_load(file), first=first)
        self.stdout.write(
            f"Mirror list {found.version} is in force here; the others and all machines hear of it."
        )

    def show(self, file: Path | None, **_: Any) -> None:
        from coordinator.eventlog.models import Origin
        from coordinator.replication.models import MirrorListVersion

        signed = _load(file) if file else getattr(MirrorListVersion.objects.last(), "signed", None)
        if signed is None:
            raise CommandError("there is no mirror list here: begin one")
        self._tell(signed)
        if file is None:
            for origin in Origin.objects.all():
                cut = (
                    f", cut after {origin.last_valid_seq}: {origin.truncation_reason}"
                    if origin.last_valid_seq is not None
                    else ""
                )
                self.stdout.write(
                    f"  log {origin.pk} of {origin.key[:16]}: {origin.head_seq} events{cut}"
                )

    def _tell(self, signed: SignedMirrorList) -> None:
        found = parse_list(signed)
        until = time.strftime("%Y-%m-%d", time.gmtime(found.expires))
        self.stdout.write(f"Mirror list {found.version}, until {until}, BLAKE3 {signed.digest}")
        for each in found.mirrors:
            gone = f" (expelled: {each.expelled.reason})" if each.expelled else ""
            self.stdout.write(f"  mirror {each.key[:16]} {each.url} {each.name}{gone}")
        for key in found.roots:
            self.stdout.write(f"  root {key}{' has signed' if key in signed.signatures else ''}")
        self.stdout.write(f"  {found.threshold} of {len(found.roots)} roots must sign")


def _next(proposal: Path) -> MirrorList:
    """The list that a proposal changes further, or the one in force here, a version on."""
    from coordinator.replication import mirror_list

    held = mirror_list.newest_list()
    if proposal.exists():
        found = parse_list(_load(proposal))
        if held is None or found.version > held.version:
            return found
    if held is None:
        raise CommandError("there is no mirror list here: begin one")
    return held.model_copy(update={"version": held.version + 1})


def _keep(file: Path, signed: SignedMirrorList) -> None:
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(signed.model_dump_json(indent=1))
    fresh.replace(file)


def _load(file: Path) -> SignedMirrorList:
    try:
        return SignedMirrorList.model_validate_json(file.read_bytes())
    except ValidationError:
        raise CommandError(f"{file} is not a mirror list") from None
