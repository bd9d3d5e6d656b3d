"""Test `manage.py mirror_list` and `manage.py replication`."""

import pytest
from django.core.management import CommandError, call_command
from helpers.mirrors.event_log_builder import count_stored
from helpers.mirrors.fake_mirror import FakeMirror, local_entry
from helpers.mirrors.mirror_lists import signed_list

from barnraise.protocol.signing import Identity
from coordinator.eventlog.models import LogEvent
from coordinator.replication import mirror_list
from coordinator.replication.models import MirrorListVersion

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]
STRANGER = Identity(b"x" * 32)


def run_command(*words: str) -> str:
    """Run a management command and return its output."""
    from io import StringIO

    out = StringIO()
    call_command(*words, stdout=out)
    return out.getvalue()


@pytest.fixture
def roots(tmp_path) -> list[str]:
    return [
        run_command("mirror_list", "keygen", str(tmp_path / f"root{n}")).strip() for n in range(3)
    ]


def begin_list(tmp_path, roots) -> str:
    """Begin a mirror list that two of the roots must sign; return its file."""
    file = str(tmp_path / "list.json")
    run_command(
        "mirror_list",
        "begin",
        "--url",
        "https://here.example.org",
        "--name",
        "here",
        "--to",
        file,
        "--threshold",
        "2",
        *(word for root in roots for word in ("--root", root)),
    )
    return file


def test_next_mirror_list_contains_the_relays_of_the_setting(tmp_path, roots, settings):
    file = begin_list(tmp_path, roots)
    for root in ("root0", "root1"):
        run_command("mirror_list", "sign", file, "--key", str(tmp_path / root))
    assert "relays: none" in run_command("mirror_list", "publish", file, "--first") + run_command(
        "mirror_list", "show"
    )
    assert mirror_list.relays_in_force() == ()
    settings.RELAYS = ["default", "https://relay.example.org"]
    second = str(tmp_path / "second.json")
    shown = run_command("mirror_list", "renew", "--to", second)
    assert "relays: default, https://relay.example.org" in shown
    for root in ("root0", "root1"):
        run_command("mirror_list", "sign", second, "--key", str(tmp_path / root))
    run_command("mirror_list", "publish", second)
    assert mirror_list.relays_in_force() == ("default", "https://relay.example.org")
    settings.RELAYS = ["http://relay.example.org"]
    with pytest.raises(CommandError, match="relays"):
        run_command("mirror_list", "renew", "--to", str(tmp_path / "third.json"))


def test_mirror_list_commands_begin_sign_publish_add_and_expel(tmp_path, roots):
    assert (tmp_path / "root0").stat().st_mode & 0o077 == 0, "others can read the key"
    file = begin_list(tmp_path, roots)
    with pytest.raises(CommandError, match="signed by 0 of"):
        run_command("mirror_list", "publish", file, "--first")
    run_command("mirror_list", "sign", file, "--key", str(tmp_path / "root0"))
    assert "has signed" in run_command(
        "mirror_list", "sign", file, "--key", str(tmp_path / "root2")
    )
    assert "list 1 is in force" in run_command("mirror_list", "publish", file, "--first")
    second = str(tmp_path / "second.json")
    run_command(
        "mirror_list",
        "add",
        "--key",
        STRANGER.key,
        "--url",
        "https://b.example.org",
        "--name",
        "b",
        "--to",
        second,
    )
    run_command(
        "mirror_list", "expel", "--key", STRANGER.key[:8], "--last", f"{'a' * 32}:4", "--to", second
    )
    for name in ("root0", "root1"):
        run_command("mirror_list", "sign", second, "--key", str(tmp_path / name))
    run_command("mirror_list", "publish", second)
    newest = mirror_list.newest_list()
    assert newest is not None and newest.version == 2
    expelled = newest.find(STRANGER.key)
    assert expelled is not None and expelled.expelled is not None
    assert expelled.expelled.last == {"a" * 32: 4}
    assert "(expelled" in run_command("mirror_list", "show")
    with pytest.raises(CommandError, match="in force already"):
        run_command("mirror_list", "publish", second)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("keygen", "{root}"), "never written over"),
        (("sign", "{file}", "--key", "{none}"), "no key at"),
        (("sign", "{none}", "--key", "{root}"), "No such file"),
        (("sign", "{root}", "--key", "{root}"), "is not a mirror list"),
        (("sign", "{file}", "--key", "{file}"), "is not a key"),
        (("show",), "begin one"),
        (("add", "--key", "k", "--url", "https://b", "--name", "b", "--to", "{file}"), "key"),
        *(
            (("add", "--key", "{stranger}", "--url", url, "--name", "b", "--to", "{file}"), reason)
            for url, reason in (
                ("ftp://b", "'ftp://b' is no URL"),
                ("https://a..b.invalid", "'https://a..b.invalid' is no URL"),
                ("https://b.invalid/barn", "needs a host name of its own"),
            )
        ),
        *(
            (("renew", "--to", "{file}", "--days", days), "a list that has expired")
            for days in ("0", "-1", "nan")
        ),
        (("expel", "--key", "{stranger}", "--to", "{file}"), "is not one mirror"),
    ],
)
def test_impossible_mirror_list_command_is_refused_with_a_reason(tmp_path, roots, words, sentence):
    file = begin_list(tmp_path, roots)
    names = {
        "file": file,
        "root": str(tmp_path / "root0"),
        "none": str(tmp_path / "none"),
        "stranger": STRANGER.key,
    }
    with pytest.raises(CommandError, match=sentence):
        run_command("mirror_list", *(word.format(**names) for word in words))


def test_new_mirror_bootstraps_from_any_other(log):
    mirror = FakeMirror(log)
    first = signed_list(1, local_entry(), mirror.list_entry)
    mirror.lists = [first]
    with pytest.raises(CommandError, match="Nothing was taken"):
        run_command("replication", "join", mirror.url, "--list", "0" * 64)
    with pytest.raises(CommandError, match=r"'https://a\.\.b\.invalid' is no URL"):
        run_command("replication", "join", "https://a..b.invalid")
    assert not MirrorListVersion.objects.exists() and not LogEvent.objects.exists()
    assert "10 events in 1 logs" in run_command(
        "replication", "join", mirror.url, "--list", first.digest
    )
    newest = mirror_list.newest_list()
    assert count_stored(log) == 10 and newest is not None and newest.version == 1
    assert "state " in run_command("replication", "pull")
    mirror.close()
