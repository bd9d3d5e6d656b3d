"""Test that an exported model is pushed to a stand-in for the Hugging Face hub."""

import pytest
from helpers.worker.fake_hub import open_writable_hub

from barnraise.errors import StateError
from barnraise.training.model_files.hub_push import HubRepository


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Yield a hub on this machine, with a token that may write in the environment."""
    served = open_writable_hub(monkeypatch, tmp_path)
    yield served
    served.close()


@pytest.fixture
def folder(tmp_path):
    """Return a folder with an exported model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"n_layer": 2}')
    (folder / "model.safetensors").write_bytes(b"w" * 70_000)
    (folder / ".unrelated").write_text("not ours")
    return folder


def test_folder_is_committed_to_a_new_repository(hub, folder):
    address = HubRepository.choose("owner/tiny", is_private=True).push(folder, "Run a-run")
    assert address == f"{hub.url}/owner/tiny"
    files = hub.repositories["models/owner/tiny"]
    assert sorted(files) == ["config.json", "model.safetensors"]
    assert files["model.safetensors"] == b"w" * 70_000
    assert files["config.json"] == (folder / "config.json").read_bytes()


def test_existing_repository_keeps_its_other_files(hub, folder):
    hub.repositories["models/owner/tiny"] = {"LICENSE": b"mine", "config.json": b"old"}
    HubRepository.choose("owner/tiny", is_private=False).push(folder, "Run a-run")
    files = hub.repositories["models/owner/tiny"]
    assert files["LICENSE"] == b"mine" and files["config.json"] != b"old"


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "../x", "owner/", "own er/x", "https://h/o/n"])
def test_name_that_is_no_repository_is_refused_at_once(hub, name):
    with pytest.raises(StateError, match="write it as owner/name"):
        HubRepository.choose(name, is_private=False)


def test_missing_token_is_refused_at_once(hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(StateError, match="HF_TOKEN"):
        HubRepository.choose("owner/tiny", is_private=False)


def test_token_that_the_hub_refuses_is_a_sentence(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    repository = HubRepository.choose("owner/tiny", is_private=False)
    with pytest.raises(StateError, match="does not accept the token"):
        repository.push(folder, "Run a-run")
    assert not hub.repositories


def test_hub_that_does_not_answer_is_a_sentence(hub, folder):
    repository = HubRepository.choose("owner/tiny", is_private=False)
    hub.close()
    with pytest.raises(StateError, match=r"owner/tiny was not pushed: .*tries again"):
        repository.push(folder, "Run a-run")
