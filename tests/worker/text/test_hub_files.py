"""Datasets of a stand-in of the hub are read by their own metadata, or a choice is refused.

Each test has a process's only hub: `huggingface_hub` reads its address when it is imported.
"""

import json
import os
import subprocess
import sys

import pytest
from helpers.paths import WORKER
from helpers.python_code import run_python
from helpers.worker.fake_hub import FakeHub
from helpers.worker.text_files import archive

from barnraise.errors import TextError
from barnraise.text.hub_files import hub_errors

TEXTS = [f"Row {i} has some words in it." for i in range(40)]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
CARD = (
    b"---\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en/*.jsonl\n"
    b"- config_name: de\n  data_files: de/*.jsonl\n---\n"
)


ARCHIVED = dict.fromkeys(("in/train.jsonl", "in/test.jsonl", "in/passwords.json"), JSONL)
DATASETS = {
    "barn/plain": {
        "train.jsonl": JSONL,
        "test.jsonl": JSONL[:400],
        "LICENSE.txt": b"licence",
        "README.md": b"# Plain",
        ".gitattributes": b"x",
    },
    "barn/licensed": {"rows.csv": b"text\n" + JSONL, "LICENSE.txt": b"l", "NOTICE.txt": b"n"},
    "barn/configured": {"README.md": CARD, "en/a.jsonl": JSONL, "de/b.jsonl": JSONL[:400]},
    "barn/languages": {"en.jsonl": JSONL, "de.jsonl": JSONL},
    "barn/book": {"book.txt": "\n".join(TEXTS).encode()},
    "barn/images": {"a.png": b"x", "README.md": b"# Images"},
    "barn/zipped": {
        "data.zip": archive(**ARCHIVED),
        "requirements.txt": b"r",
    },
    "barn/private": {"a.txt": JSONL, ".git/b.txt": b"b", "secrets/c.txt": b"c"},
}
# What is typed → the files that are read, or a part of the sentence that refuses it.
CASES = {
    "barn/plain": ["train.jsonl"],
    "barn/plain:test": ["test.jsonl"],
    "barn/plain:validation": "no split 'validation'; there are test, train",
    "barn/plain#body": "no column 'body'; its columns are text",
    "barn/licensed": ["rows.csv"],
    "barn/configured": "several configurations: name one as hf:barn/configured/CONFIG, of en, de",
    "barn/configured/de": ["de/b.jsonl"],
    "barn/configured/fr": "no configuration 'fr'; it has en, de",
    "barn/configured/en:test": "no split 'test'; it has train",
    "barn/configured/en/a.jsonl": ["en/a.jsonl"],
    "barn/plain/test.jsonl": ["test.jsonl"],
    "barn/plain/no.jsonl": "has no file or folder 'no.jsonl'",
    "barn/languages": "mixes the languages de, en",
    "barn/book": ["book.txt"],
    "barn/zipped": ["data.zip/in/train.jsonl"],
    "barn/private": ["a.txt"],
    "barn/images": "holds no text that this version reads; it holds .md, .png",
    "barn/nothing": "does not exist, or HF_TOKEN has no access to it",
}
SCRIPT = """
import json, sys
from barnraise.errors import TextError
from barnraise.spec import TextSpec
from barnraise.text.inspection import inspect_source
from barnraise.text.places import parse_place
from barnraise.text.reading import open_source
from barnraise.text.shards import TextPlan
found = {}
for place in sys.argv[1:]:
    try:
        with open_source([parse_place(f"hf:{place}")]) as source:
            inspection = inspect_source(source, TextPlan(TextSpec(tokenizer="bytes")))
            found[place] = inspection.refusal or [file.path for file in inspection.files]
    except TextError as error:
        found[place] = str(error)
print(json.dumps(found))
"""


@pytest.fixture
def hub():
    hub = FakeHub()
    hub.repositories = {f"datasets/{name}": files for name, files in DATASETS.items()}
    yield hub
    hub.close()


def read_places(hub: FakeHub, folder, *places: str) -> dict[str, object]:
    """Read datasets in a process of its own, and return what was found in each."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(WORKER),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder),
        "HF_TOKEN": "hf_thesecretoftheowner\n",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *places],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0 and "thesecretoftheowner" not in result.stderr, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_token_that_was_pasted_with_quotes_is_named_and_not_shown(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "“hf_abcdefgh”")
    with pytest.raises(TextError, match="copy it again") as raised, hub_errors("owner/name"):
        "Bearer “hf_abcdefgh”".encode("ascii")
    assert "abcdefgh" not in str(raised.value)


@pytest.mark.slow  # it imports datasets
def test_datasets_are_read_by_their_metadata_or_refused(hub, tmp_path):
    found = read_places(hub, tmp_path, *CASES)
    for place, expected in CASES.items():
        if isinstance(expected, str):
            assert expected in found[place], (place, found[place])
        else:
            repository = "/".join(place.partition(":")[0].split("/")[:2])
            assert found[place] == [f"hf:{repository}/{name}" for name in expected], place
    tokens = {headers.get("authorization") for _, _, headers in hub.requests}
    assert tokens == {"Bearer hf_thesecretoftheowner"}, "the token was trimmed"


@pytest.mark.slow  # the library waits before it tries again
def test_busy_hub_is_asked_again(hub, tmp_path):
    hub.failures = [503, 429]
    assert read_places(hub, tmp_path, "barn/book") == {"barn/book": ["hf:barn/book/book.txt"]}
    assert not hub.failures


@pytest.mark.slow  # the library waits before it tries again
def test_file_that_the_hub_does_not_send_refuses_the_text(hub, tmp_path):
    """Leaving it out would silently give another text."""
    hub.repositories["datasets/barn/two"] = {"a.txt": JSONL, "b.txt": JSONL[:400]}
    hub.failures = [0] * 50  # each connection is cut
    found = read_places(hub, tmp_path, "barn/two")["barn/two"]
    assert isinstance(found, str) and "\n" not in found
    assert found.startswith("hf:barn/two/a.txt cannot be read: ")


@pytest.mark.parametrize(
    "module", ["text.hub_files", "training.model_files.hub_push", "text.existing_tokenizer"]
)
def test_hub_files_come_by_no_program_with_rules_of_its_own(module):
    code = (
        f"import barnraise.{module}; from huggingface_hub.constants import HF_HUB_DISABLE_XET; "
        "print(HF_HUB_DISABLE_XET)"
    )
    assert run_python(code).stdout.strip() == "True"
