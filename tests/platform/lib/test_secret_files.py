"""Test the files of secrets."""

from coordinator.lib.secret_files import load_or_create_secret


def test_secret_is_created_once_and_readable_by_its_owner_only(tmp_path):
    path = tmp_path / "state" / "secret_key"
    assert load_or_create_secret(path) == load_or_create_secret(path)
    assert path.stat().st_mode & 0o077 == 0
