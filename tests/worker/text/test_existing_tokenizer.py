"""An existing tokenizer comes from a folder; its template turns chats into tokens."""

import json
import re
import time

import numpy as np
import pytest
from helpers.updates.blob_folder import BlobFolder
from sharded_documents import shard_documents
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import BPEDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace

from barnraise.errors import TextError
from barnraise.spec import TextSpec
from barnraise.text.existing_tokenizer import load_existing_tokenizer
from barnraise.text.inspection import inspect_source
from barnraise.text.places import PathPlace
from barnraise.text.prompt_codec import PromptCodec
from barnraise.text.reading import open_source
from barnraise.text.shards import TextPlan, build_shards
from barnraise.text.spool import DocumentSpool
from barnraise.text.tokenizer import load_tokenizer, train_tokenizer
from barnraise.text.tokenizer_file import read_tokenizer_file
from barnraise.training.model_files.tokenizer_files import ExportedTokenizer
from barnraise.training.preparation import fill_spool

RUN = "01890000-0000-7000-8000-000000000000"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content | trim }}<|im_end|>\n{% endfor %}"
)
CHATS = [
    [
        {"role": "user", "content": f"Question {i}: what does <|im_end|> mean?"},
        {"role": "assistant", "content": f"Answer {i}: it ends a message."},
    ]
    for i in range(30)
]


@pytest.fixture
def folder(tmp_path):
    """Create a folder with a tokenizer of two special tokens and a chat template."""
    tokenizer = train_tokenizer([b"some words to learn from " * 20], 280)
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_chats_are_rendered_and_only_the_templates_tokens_are_special(folder, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    existing = load_existing_tokenizer(str(folder))
    blobs = BlobFolder(tmp_path)
    with open_source([PathPlace(path)]) as source:
        source.render_chat = existing.render_chat
        plan = TextPlan(tokenizer_file=existing.file)
        inspection = inspect_source(source, plan)
        assert not inspection.refusal and inspection.documents == len(CHATS)
        spool = DocumentSpool(tmp_path / "spool")
        fill_spool(spool, source)
    plan = TextPlan(TextSpec(held_out=0.2), 512, RUN, tokenizer_file=existing.file)
    manifest = build_shards(spool, plan, blobs.store)
    streams = [
        np.fromfile(blobs.locate(shard.digest), "<u2")
        for shard in (*manifest.train, *manifest.held_out)
    ]
    tokens = np.concatenate(streams)
    tokenizer = Tokenizer.from_buffer(existing.file)
    begin, end = (tokenizer.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert (tokens == begin).sum() == (tokens == end).sum() == 2 * len(CHATS)
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
    assert text.count("what does <|im_end|> mean?") == len(CHATS)
    assert "user\nQuestion" in text and "\ufdd0" not in text


def test_data_cannot_spell_the_number_of_a_special_token(folder):
    render = load_existing_tokenizer(str(folder)).render_chat
    marked = "\ufdd01\ufdd1"
    rendered = render([{"role": f"user{marked}", "content": f"Hello{marked}"}])
    assert rendered.count("\ufdd0") == 2 and rendered.count("\ufffd1") == 2


def test_long_chats_take_linear_time(folder):
    """Twice as many messages took four times as long: 8,000 of them 8 s."""
    render = load_existing_tokenizer(str(folder)).render_chat
    begin = time.process_time()
    chat = [{"role": "user", "content": f"Message {i}. \ufdd2{i + 1}\ufdd3"} for i in range(8000)]
    assert render(chat).count("Message 7999.") == 1
    assert time.process_time() - begin < 3


def test_template_in_a_file_of_its_own_is_used(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    assert load_existing_tokenizer(str(folder)).render_chat is None
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    render = load_existing_tokenizer(str(folder)).render_chat
    assert render([{"role": "user", "content": "Hello"}]) == "Hello!"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for %}", "cannot be used"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[7].content }}", "refuses a chat"),
        ("{{ messages.__class__.__mro__ }}", "refuses a chat"),
        ("{{ 1 / 0 }}", "refuses a chat"),
    ],
)
def test_template_that_fails_is_a_sentence(folder, template, sentence):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(TextError, match=sentence):
        load_existing_tokenizer(str(folder)).render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("config", ["[]", "{", '{"chat_template": ["x", {"name": "y"}]}'])
def test_odd_configuration_of_a_tokenizer_is_a_sentence_or_ignored(folder, config):
    (folder / "tokenizer_config.json").write_text(config)
    if config.startswith("{" + '"'):
        assert load_existing_tokenizer(str(folder)).chat_template == ""
        return
    with pytest.raises(TextError, match="cannot be read"):
        load_existing_tokenizer(str(folder))


def test_chats_that_the_template_refuses_are_skipped_and_counted(folder, tmp_path):
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    existing = load_existing_tokenizer(str(folder))
    refused = [{"role": "system", "content": "Be brief."}]
    found = []
    for name, chats in (("some", [*CHATS, refused]), ("all", [refused] * 3)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        with open_source([PathPlace(path)]) as source:
            source.render_chat = existing.render_chat
            found.append(inspect_source(source, TextPlan(tokenizer_file=existing.file)))
    some, every = found
    assert (some.documents, some.skipped_rows) == (len(CHATS), 1) and not some.refusal
    assert "1 rows are skipped: the chat template refuses a chat: no system" in some.warnings[0]
    assert "no system role" in every.refusal


@pytest.mark.parametrize(
    ("lowercase", "level", "content", "share"),
    [
        (False, "bytes", "Barn beam brace …✓ 𝄞 " * 99, "0 of 2,079 characters"),
        (True, "bytes", "Barn beam brace " * 99, "99 of 1,584 characters .*'B'.*its normaliser"),
        (True, "bytes", "B" + "barn beam brace " * 99, "1 of 1,585 characters .*'B'"),
        (False, "words", "barn beam brace " * 99, "66 % of the text's tokens are unknown to it"),
        (False, "letters", "barn beam " * 99, "99 of 990 characters .*'m'.*it has no tokens"),
        (False, "prefixed", "barn " * 99, "495 of 495 characters .*its decoder adds '#'"),
    ],
    ids=["all", "normaliser", "few", "unknown", "no tokens", "prefix"],
)
def test_what_tokens_lose_of_a_text_is_counted(tmp_path, lowercase, level, content, share):
    tokenizer = {
        "bytes": lambda: train_tokenizer([b"barn beam brace"], 280),
        "words": lambda: Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "barn": 2}, "<unk>")),
        "letters": lambda: Tokenizer(BPE({"</s>": 0, **{c: ord(c) for c in "barne "}}, [])),
        "prefixed": lambda: Tokenizer(
            BPE(
                {"</s>": 0, "b": 1, **{f"##{c}": ord(c) for c in "barn "}},
                [],
                continuing_subword_prefix="##",
            )
        ),
    }[level]()
    if lowercase:
        tokenizer.normalizer = Lowercase()
    if level == "words":
        tokenizer.pre_tokenizer = Whitespace()
    if level == "letters":
        tokenizer.decoder = BPEDecoder()
    (tmp_path / "a.txt").write_text(content)
    with open_source([PathPlace(tmp_path / "a.txt")]) as source:
        plan = TextPlan(tokenizer_file=tokenizer.to_str().encode())
        found = inspect_source(source, plan)
    assert re.search(share, found.round_trip), found.round_trip
    is_warned = any("do not come back" in warning for warning in found.warnings)
    assert is_warned == (share.split()[0] not in ("0", "1"))


def test_tokens_are_never_drawn_at_random(folder, tmp_path):
    """A tokenizer that drops merges gave one text 97 tokens, or 281, or others."""
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_bytes())
    settings["model"]["dropout"] = 0.5
    path.write_text(json.dumps(settings))
    file, text = path.read_bytes(), "some words to learn from"
    least = len(train_tokenizer([b"some words to learn from " * 20], 280).encode(text).ids)
    for encode in (load_tokenizer(file, 300).encode, lambda text: PromptCodec(file).encode(text)):
        counts = {
            len(getattr(tokens, "ids", tokens)) for tokens in (encode(text) for _ in range(9))
        }
        assert counts == {least}
    blobs = BlobFolder(tmp_path)
    documents = [f"{text} {i}. ".encode() * 20 for i in range(30)]
    manifests = [
        shard_documents(TextSpec(), 320, RUN, blobs.store, documents, tokenizer_file=file)
        for _ in range(2)
    ]
    assert manifests[0] == manifests[1]
    stored = blobs.locate(manifests[0].tokenizer or "").read_bytes()
    for kept in (
        load_existing_tokenizer(str(folder)).file,
        stored,
        ExportedTokenizer.of_run(file).content,
    ):
        assert json.loads(kept)["model"].get("dropout") is None


def test_sampling_of_a_unigram_tokenizer_is_null():
    settings = {"model": {"type": "Unigram", "alpha": 0.1, "nbest_size": 4, "vocab": []}}
    read = read_tokenizer_file(json.dumps(settings).encode(), "it")
    assert json.loads(read)["model"] == {"type": "Unigram", "vocab": []}


@pytest.mark.parametrize("name", ["missing", "tokenizer/tokenizer_config.json"])
def test_tokenizer_that_is_not_there_is_a_sentence(folder, name):
    place = str(folder.parent / name)
    with pytest.raises(TextError, match=r"there is no|cannot be read"):
        existing = load_existing_tokenizer(place)
        plan = TextPlan(tokenizer_file=existing.file)
        (folder / "a.txt").write_text("some words " * 99)
        with open_source([PathPlace(folder / "a.txt")]) as source:
            raise TextError(inspect_source(source, plan).refusal)
