"""What a run's owner, a site, or an on-path attacker sends to a volunteer's machine to harm it.

The drill's window "owner's files" runs this script: every file, manifest and answer goes to the
worker's own code in one process, which prints a line of JSON for each. An attack is refused if it
ends in one sentence, in little time and memory.
"""

import contextlib
import functools
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import zstandard

from barnraise.cli.browser import open_page
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.coordinator_client.token_client import TokenClient
from barnraise.errors import BarnraiseError, TextError
from barnraise.ledger.blob_store import BlobStore
from barnraise.planning.limits import Limits
from barnraise.protocol.coordinator_messages import MachineDescription, Shard, TextManifest
from barnraise.protocol.signing import Identity, open_signed
from barnraise.spec import MAX_SHARD_TOKENS, MAX_TOKENIZER_BYTES
from barnraise.training.model_files.tokenizer_files import ExportedTokenizer
from barnraise.training.prefetch import reserve_text
from barnraise.training.samples import SampleWriter

RUN = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"
VOCABULARY = 320
MAX_SECONDS = 5.0  # of the processor, for one attack
MAX_GROWTH_MB = 100.0  # of the process's largest memory, by one attack
ALL_SECONDS = 240.0  # for all attacks, most of it on a busy machine
BOMB_BYTES = 1 << 28  # that a compressed answer stands for
GZIP_BITS = 16 + zlib.MAX_WBITS  # of zlib's window, with gzip's header
CONTROLS = "\x1b]0;owned\x07\x1b[2J"
PAGES = ("file:///C:/Windows/System32/calc.exe", r"\\evil.example\share\x.exe", "calc.exe")


class HarmfulError(Exception):
    """Something was opened or accepted that harms the machine."""


# ---- tokenizer files ---------------------------------------------------------------------------


def build_tokenizer(model: dict[str, Any] | None = None, **parts: Any) -> bytes:
    """Return a tokenizer.json of a few letters, with other parts."""
    letters = {text: number for number, text in enumerate(["</s>", *"abcdefgh"])}
    tokens = [{"id": 0, "content": "</s>", "special": True}]
    bpe = {"type": "BPE", "vocab": letters, "merges": []} | (model or {})
    return json.dumps({"added_tokens": tokens, "model": bpe, **parts}).encode()


def replace_letters(*pairs: tuple[str, str]) -> dict[str, Any]:
    """Return normalizers that replace one text by another, one after the other."""
    steps = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in pairs]
    return {"type": "Sequence", "normalizers": steps}


def split_by(pattern: str) -> dict[str, Any]:
    """Return a pre-tokenizer that splits by a regular expression."""
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


TOKENIZERS: dict[str, bytes] = {
    "normalizers that multiply the text": build_tokenizer(
        normalizer=replace_letters(("a", "b" * 1000), ("b", "c" * 1000))
    ),
    "a regular expression without end": build_tokenizer(pre_tokenizer=split_by("(a+)+$")),
    "a regular expression in a normalizer": build_tokenizer(
        normalizer={"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": ""}
    ),
    "a token number of 4·10⁸": build_tokenizer({"vocab": {"</s>": 0, "a": 400_000_000}}),
    "an added token of 4·10⁹": build_tokenizer(
        added_tokens=[{"id": 4_294_967_294, "content": "</s>", "special": True}]
    ),
    "a token of a million characters": build_tokenizer({"vocab": {"</s>": 0, "a" * 1_000_000: 1}}),
    "a decoder that multiplies the text": build_tokenizer(
        decoder={"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 30}
    ),
    "a normalizer of compiled bytes": build_tokenizer(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "////" * 100}
    ),
    "a prefix of a million characters": build_tokenizer(
        normalizer={"type": "Prepend", "prepend": "a" * 1_000_000}
    ),
    "normalizers without number": build_tokenizer(
        normalizer=replace_letters(*[("a", "b"), ("b", "a")] * 1000)
    ),
    "brackets without end": b"[" * MAX_TOKENIZER_BYTES,
    "lists without end": b'{"model": {"type": "BPE", "vocab": {}, "merges": ['
    + b"[]," * (MAX_TOKENIZER_BYTES // 4)
    + b"[]]}}",
    "more bytes than any tokenizer has": b" " * (MAX_TOKENIZER_BYTES + 1),
    "half a character": build_tokenizer({"vocab": {"</s>": 0, "\ud800": 1}}),
    "keys that two readers read differently": build_tokenizer().replace(
        b'"merges"', b'"type": "Rust", "merges"'
    ),
}


def load_for_samples(file: bytes) -> None:
    """Load an owner's tokenizer as a worker does before its first step."""
    SampleWriter([[1, 2]], file, VOCABULARY, seed=1)


def load_for_export(file: bytes) -> None:
    """Load an owner's tokenizer as `barnraise export` does."""
    ExportedTokenizer.of_run(file)


# ---- manifests -----------------------------------------------------------------------------------


def build_manifest(tokens: int, shards: int) -> TextManifest:
    """Return the manifest of a text; what it states is not checked, as by its owner's program."""
    shard = Shard.model_construct(digest="0" * 64, tokens=tokens)
    return TextManifest.model_construct(
        run=RUN, vocabulary=256, tokenizer=None, train=[shard] * shards, held_out=[shard]
    )


def open_impossible_text() -> None:
    """Receive a manifest of 2,000 PB."""
    owner = Identity(b"o" * 32)
    signed = owner.sign("manifest", build_manifest(10**15, 1000))
    open_signed(signed, "manifest", TextManifest)


def open_large_text() -> None:
    """Receive a manifest of more bytes than the machine's owner allows."""
    with tempfile.TemporaryDirectory(prefix="barnraise-owner-") as folder:
        manifest = build_manifest(MAX_SHARD_TOKENS, 1000)
        reserve_text(Limits(disk=10**10), manifest, BlobStore(Path(folder)))


def open_impossible_prompts() -> None:
    """Receive prompts with a token that the model does not have."""
    SampleWriter([[VOCABULARY]], None, VOCABULARY, seed=1)


# ---- a site, and an on-path attacker -------------------------------------------------------------


@contextlib.contextmanager
def serve_answer(body: bytes, encoding: str = "") -> Iterator[str]:
    """Serve one answer to every request at the address that is yielded."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            if encoding:
                self.send_header("Content-Encoding", encoding)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the worker has cut it off
                self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *values: object) -> None:  # noqa: A002 -- its name there
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@functools.cache
def compress_zeros(encoding: str) -> bytes:
    """Return few bytes that stand for `BOMB_BYTES`, in little memory: an attack's is measured."""
    if encoding == "zstd":
        compressor = zstandard.ZstdCompressor().compressobj(size=BOMB_BYTES)
    else:
        compressor = zlib.compressobj(1, wbits=GZIP_BITS if encoding == "gzip" else zlib.MAX_WBITS)
    zeros = bytes(1 << 20)
    pieces = [compressor.compress(zeros) for _ in range(BOMB_BYTES >> 20)]
    return b"".join([*pieces, compressor.flush()])


ENCODINGS = ("gzip", "deflate", "zstd")


def request_by_machine(encoding: str) -> None:
    """Receive a compressed answer as a machine; mirrors use the same client."""
    with serve_answer(compress_zeros(encoding), encoding) as url:
        CoordinatorClient(url, Identity(b"m" * 32)).pin_mirror()


def request_by_script(encoding: str) -> None:
    """Receive a compressed answer as a person's script."""
    with serve_answer(compress_zeros(encoding), encoding) as url:
        TokenClient(url, "a-token").request_json("GET", "runs")


def enrol_at_a_liar() -> None:
    """Receive a code that controls the terminal."""
    reply = {"code": CONTROLS, "url": PAGES[0], "expires": 9e9, "poll_every": 1}
    with serve_answer(json.dumps(reply).encode()) as url:
        machine = Identity(b"m" * 32)
        client = CoordinatorClient(url, machine, machine.key)
        client.request_enrolment(MachineDescription(hostname="attic"))


def open_programs() -> None:
    """Open addresses that start a program."""
    opened: list[str] = []
    with (
        mock.patch("barnraise.cli.browser.webbrowser.open", opened.append),
        mock.patch("barnraise.cli.browser.has_desktop", lambda *_: True),
        mock.patch("sys.stdout.isatty", lambda: True, create=True),
    ):
        if any([open_page(page) for page in PAGES]) or opened:  # all are tried
            raise HarmfulError(f"a browser was asked to open {opened}")
    raise TextError("none of the addresses is a page")


def list_attacks() -> dict[str, Callable[[], None]]:
    """Return all attacks by name."""
    attacks: dict[str, Callable[[], None]] = {}
    for name, file in TOKENIZERS.items():
        attacks[f"tokenizer: {name}"] = lambda file=file: load_for_samples(file)
    for encoding in ENCODINGS:
        attacks[f"machine: {encoding}"] = lambda encoding=encoding: request_by_machine(encoding)
        attacks[f"script: {encoding}"] = lambda encoding=encoding: request_by_script(encoding)
    large_number = TOKENIZERS["a token number of 4·10⁸"]
    return attacks | {
        "an export": lambda: load_for_export(large_number),
        "a text of 2,000 PB": open_impossible_text,
        "a text larger than the disk": open_large_text,
        "prompts of impossible tokens": open_impossible_prompts,
        "an enrolment's code": enrol_at_a_liar,
        "an enrolment's page": open_programs,
    }


def try_attack(attack: Callable[[], None]) -> dict[str, Any]:
    """Make one attack; return whether it was refused, and what it cost."""
    started, before = time.process_time(), largest_memory_mb()
    is_refused, sentence = False, "nothing was refused"
    try:
        attack()
    except BarnraiseError as error:
        is_refused, sentence = True, str(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        sentence = f"{type(error).__name__}: {error}"
    seconds, growth = time.process_time() - started, largest_memory_mb() - before
    return {
        "refused": is_refused and seconds <= MAX_SECONDS and growth <= MAX_GROWTH_MB,
        "seconds": round(seconds, 2),
        "growth_mb": round(growth),
        "sentence": sentence[:200],
    }


def largest_memory_mb() -> float:
    """Return the largest memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def try_all_attacks() -> dict[str, dict[str, Any]]:
    """Make all attacks in a process of its own; one that ends the process is not refused."""
    try:
        output = subprocess.run(
            [sys.executable, __file__],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=ALL_SECONDS,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode()
    results = dict(json.loads(line) for line in output.splitlines() if line.endswith("]"))
    missing = {"refused": False, "sentence": "the process ended before it had an answer"}
    return {name: results.get(name, missing) for name in list_attacks()}


def main() -> None:
    """Make all attacks, and print the result of each as a line of JSON."""
    for encoding in ENCODINGS:
        compress_zeros(encoding)  # which is the attacker's work
    for name, attack in list_attacks().items():
        print(json.dumps([name, try_attack(attack)]), flush=True)


if __name__ == "__main__":
    main()
