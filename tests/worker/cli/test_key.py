"""Test the encrypted backup of a machine's key."""

import stat

import pytest
from helpers.worker.command_line import RUN, invoke
from helpers.worker.fake_coordinator import enrol
from helpers.worker.other_worker import other_worker

from barnraise.cli import key_backup
from barnraise.cli.key_backup import HEADER, KeyBackup, decrypt_backup, encrypt_backup
from barnraise.errors import StateError
from barnraise.state_dir import StateDir

PASSPHRASE = "correct horse 🐎 staple"


@pytest.fixture(autouse=True)
def cheap_scrypt(monkeypatch):
    """Guessing may be cheap in a test; one test below uses the real cost."""
    monkeypatch.setattr(key_backup, "COST", 1 << 10)


@pytest.fixture
def home(tmp_path):
    state_dir = StateDir(tmp_path / "home")
    enrol(state_dir, "https://train.example.org", state_dir.identity.key)
    return state_dir


def export(home: StateDir, file, typed=f"{PASSPHRASE}\n{PASSPHRASE}\n") -> str:
    return invoke("key", "export", str(file), "--home", str(home.path), typed=typed)


def import_into(folder, file, passphrase=PASSPHRASE) -> str:
    return invoke("key", "import", str(file), "--home", str(folder), typed=f"{passphrase}\n")


def test_key_and_enrolment_move_to_another_computer(home, tmp_path):
    file = tmp_path / "backup.key"
    output = export(home, file)
    assert home.identity.key[:16] in output and PASSPHRASE not in output
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert home.identity.secret not in file.read_bytes()
    assert "train.example.org" not in file.read_bytes().decode("latin-1")
    output = import_into(tmp_path / "new", file)
    assert "enrolled at https://train.example.org" in output
    moved = StateDir(tmp_path / "new")
    assert moved.identity.secret == home.identity.secret
    assert moved.membership == home.membership
    assert stat.S_IMODE((tmp_path / "new" / "key").stat().st_mode) == 0o600


def test_export_refuses_to_overwrite_and_asks_twice(home, tmp_path):
    file = tmp_path / "backup.key"
    file.write_text("something else")
    with pytest.raises(StateError, match="is not overwritten"):
        export(home, file)
    assert file.read_text() == "something else"
    other = tmp_path / "other.key"
    output = export(home, other, f"{PASSPHRASE}\nmistyped\n{PASSPHRASE}\n{PASSPHRASE}\n")
    assert "do not match" in output and other.exists()
    with pytest.raises(StateError, match="at least 8 characters"):
        export(home, tmp_path / "third.key", "short\nshort\n")
    assert not (tmp_path / "third.key").exists()


def test_export_of_a_home_without_a_key_creates_none(tmp_path):
    with pytest.raises(StateError, match="there is no key in"):
        invoke("key", "export", str(tmp_path / "f"), "--home", str(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()


def test_import_with_the_wrong_passphrase_saves_nothing(home, tmp_path):
    file = tmp_path / "backup.key"
    export(home, file)
    with pytest.raises(StateError, match="the passphrase is wrong"):
        import_into(tmp_path / "new", file, "something else")
    assert not (tmp_path / "new").exists()


def test_every_cut_of_the_file_is_refused(home, tmp_path):
    content = encrypt_backup(
        KeyBackup(secret=home.identity.secret.hex(), membership=home.membership), PASSPHRASE
    )
    lengths = [0, 5, len(HEADER), len(HEADER) + 40, len(content) // 2, len(content) - 1]
    for length in lengths:
        with pytest.raises(StateError, match="cut short"):
            decrypt_backup(content[:length], PASSPHRASE)
    file = tmp_path / "cut.key"
    file.write_bytes(content[: len(HEADER) + 40])
    with pytest.raises(StateError, match="cut short"):
        import_into(tmp_path / "new", file)


@pytest.mark.parametrize("position", [len(HEADER), len(HEADER) + 20, -1])
def test_changed_file_is_refused(home, position):
    content = bytearray(encrypt_backup(KeyBackup(secret=home.identity.secret.hex()), PASSPHRASE))
    content[position] ^= 1
    with pytest.raises(StateError, match="was changed"):
        decrypt_backup(bytes(content), PASSPHRASE)


def test_other_files_are_refused_before_a_passphrase_is_typed(tmp_path):
    for name, content in (("photo", b"\xff\xd8\xff" * 100), ("huge", HEADER + b"x" * 20_000)):
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(StateError, match=r"no key"):
            invoke("key", "import", str(file), "--home", str(tmp_path / "new"))
    with pytest.raises(StateError, match="there is no file"):
        invoke("key", "import", str(tmp_path / "none"), "--home", str(tmp_path / "new"))


def test_import_never_replaces_a_key_nor_one_that_trains(home, tmp_path):
    file = tmp_path / "backup.key"
    export(home, file)
    other = StateDir(tmp_path / "other")
    with pytest.raises(StateError, match=r"has a key already .*barnraise remove"):
        import_into(other.path, file)
    folder = other.open_run(RUN)
    folder.close()
    with (
        other_worker(folder.path) as pid,
        pytest.raises(StateError, match=f"process {pid} trains on this machine"),
    ):
        import_into(other.path, file)
    assert StateDir(other.path).identity.key == other.identity.key != home.identity.key


def test_guessing_costs_memory(home, monkeypatch):
    monkeypatch.undo()
    assert 128 * key_backup.COST * key_backup.BLOCK_SIZE == 128 << 20  # bytes, by RFC 7914
    backup = KeyBackup(secret=home.identity.secret.hex())
    assert decrypt_backup(encrypt_backup(backup, PASSPHRASE), PASSPHRASE) == backup
