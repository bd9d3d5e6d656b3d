"""Prepare a run's text with the real command, from files and from a stand-in of the hub."""

import json
import random
from html import unescape

import pytest
from helpers.site.live_site import Person, Site, wait_until
from helpers.worker.fake_hub import FakeHub

WORDS = [
    "barn",
    "beam",
    "brace",
    "girt",
    "joist",
    "ledger",
    "mortise",
    "peg",
    "plate",
    "post",
    "purlin",
    "rafter",
    "sill",
    "tenon",
]


def sentences(count: int) -> list[str]:
    generator = random.Random(3)
    return [f"{i}: {' '.join(generator.choices(WORDS, k=40))}." for i in range(count)]


@pytest.fixture
def person(site: Site) -> Person:
    return Person(site)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    yield hub
    hub.close()


def test_prepare_from_files_shows_the_text_and_posts_its_counts(site, person, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("\n".join(sentences(200)))
    (corpus / "LICENSE.txt").write_text("Not the text.")
    run = site.launch_run("Lintel", 1_000_000, "text.source=files")
    person.enrol("scribe")
    refused = site.barnraise("scribe", "prepare", run, str(corpus))
    assert refused.wait(120) == 1
    assert "--yes prepares it without asking" in site.log("prepare-scribe")
    process = site.barnraise("scribe", "prepare", run, str(corpus), "--yes", "--preview", "1")
    assert process.wait(120) == 0, site.log("prepare-scribe")
    shown = site.log("prepare-scribe")
    assert "about the data, not part of it" in shown and "barnraise join" in shown
    page = person.http.get(f"/runs/{run}/").text
    assert "Text preview" in page and sentences(1)[0] in unescape(page)
    assert "in 1 file," in page and "asked for: the text has no more" in page
    assert not (site.folder / "scribe" / "runs").joinpath("text").exists()


@pytest.mark.slow
def test_run_on_a_dataset_of_a_hub_trains_to_its_end(site, person, hub):
    rows = "".join(json.dumps({"text": text}) + "\n" for text in sentences(400))
    hub.repositories["datasets/barn/beams"] = {
        "README.md": b"---\nlicense: mit\n---\n# Beams",
        "data/train.jsonl": rows.encode(),
        "data/test.jsonl": b'{"text": "not for training"}\n',
        "LICENSE.txt": b"Not the text.",
    }
    hub.failures = [503, 503]
    run = site.launch_run("Thatch", 60_000, "text.source=huggingface", "text.places=hf:barn/beams")
    person.enrol("reader")
    process = site.barnraise("reader", "join", run, "--threads", "1")
    assert process.wait(240) == 0, site.log("join-reader")
    wait_until(lambda: site.status("reader").get("ledger_tokens", 0) >= 60_000, "the end")
    page = person.http.get(f"/runs/{run}/").text
    assert "400 in 1 file," in page and "3 files" in page
