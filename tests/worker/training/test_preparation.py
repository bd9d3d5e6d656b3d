"""Test that a preparation which is killed at any moment continues, to the same tokens."""

import dataclasses
import os
import random
import signal

import pytest
from helpers.python_code import start_python
from helpers.worker.command_line import RUN
from helpers.worker.trained_models import larger_bpe_file

from barnraise.errors import TextError
from barnraise.ledger.blob_store import BlobStore
from barnraise.spec import ModelSpec, RunSpec, TextSpec
from barnraise.text.existing_tokenizer import ExistingTokenizer
from barnraise.text.places import PathPlace
from barnraise.text.reading import open_source
from barnraise.training.preparation import TextPreparation, build_text, check_tokenizer, plan_text

MODEL = ModelSpec(layers=2, width=32, heads=2, context=32, vocabulary=320)
SPEC = RunSpec(model=MODEL, text=TextSpec(source="files", tokenizer="bpe", shard_tokens=65_536))
# Prepare the text, and stand still at the first progress of a stage, until the parent kills it.
STAND_STILL = """
import contextlib, sys, time
from pathlib import Path
from barnraise.ledger.blob_store import BlobStore
from barnraise.spec import RunSpec
from barnraise.training.preparation import TextPreparation, build_text, plan_text

folder, corpus, stage, run, spec = sys.argv[1:]

@contextlib.contextmanager
def open_progress():
    yield stand_still

def stand_still(current, done, total):
    if current == stage and done:
        print("still", flush=True)
        time.sleep(600)

plan = plan_text(RunSpec.from_json(spec), run, None)
preparation = TextPreparation(paths=(corpus,), open_progress=open_progress)
build_text(Path(folder), plan, preparation, BlobStore(Path(folder) / "blobs").store)
"""


@pytest.fixture
def corpus(tmp_path):
    """Return a folder of three small texts without copies."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    generator = random.Random(5)
    words = [f"{c}{generator.randrange(100)}" for c in "abcdefghijklmnop" for _ in range(9)]
    for name in ("one", "two", "three"):
        lines = [" ".join(generator.choices(words, k=60)) for _ in range(150)]
        (folder / f"{name}.txt").write_text("\n\n".join(lines))
    return folder


@pytest.mark.integration
@pytest.mark.parametrize("stage", [pytest.param("reading", marks=pytest.mark.slow), "tokenising"])
def test_killed_preparation_continues_to_the_same_manifest(tmp_path, corpus, stage):
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    arguments = (folder, corpus, stage, RUN, SPEC.to_json())
    child = start_python(STAND_STILL, *arguments, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "still\n"
    os.killpg(child.pid, signal.SIGKILL)
    assert child.wait(60) == -signal.SIGKILL
    assert (folder / "text").exists(), "what was done so far lies there"
    plan = plan_text(SPEC, RUN, None)
    preparation = TextPreparation(paths=(str(corpus),))
    continued = build_text(folder, plan, preparation, BlobStore(folder / "blobs").store)
    whole = build_text(other, plan, preparation, BlobStore(other / "blobs").store)
    assert continued == whole
    assert not (folder / "text").exists()


@pytest.mark.parametrize(
    ("kind", "own", "named", "sentence"),
    [
        ("bytes", None, 310, "plain bytes"),
        ("bpe", 310, 312, "a tokenizer of their own"),
        ("bpe", 330, None, "has 330 tokens, more than the vocabulary of 320"),
        ("bpe", 310, 310, ""),
        ("bpe", None, None, ""),
    ],
)
def test_tokenizer_that_the_run_cannot_use_is_refused(kind, own, named, sentence):
    spec = dataclasses.replace(SPEC, text=TextSpec(source="files", tokenizer=kind))
    plan = plan_text(spec, RUN, larger_bpe_file(own) if own else None)
    tokenizer = ExistingTokenizer(larger_bpe_file(named)) if named else None
    if not sentence:
        check_tokenizer(plan, tokenizer)
        return
    with pytest.raises(TextError, match=sentence):
        check_tokenizer(plan, tokenizer)


def test_text_that_another_tokenizer_rendered_is_read_again(tmp_path):
    """The spool of an interrupted preparation has the numbers of one tokenizer's tokens."""
    (tmp_path / "a.txt").write_text("words " * 99)
    first, second = (ExistingTokenizer(b"{}", template) for template in ("a", "b"))
    with open_source([PathPlace(tmp_path / "a.txt")]) as source:
        assert source.fingerprint(first.digest) == source.fingerprint(first.digest)
        assert source.fingerprint(first.digest) != source.fingerprint(second.digest)
