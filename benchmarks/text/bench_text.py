"""Measure how fast text becomes tokens, against the plain tokenizers library, and in what memory.

The text is generated: words of a made-up language by Zipf's law, as JSON lines of 2 kB documents.
"""

import argparse
import json
import os
import platform
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from blake3 import blake3
from tokenizers import Tokenizer

from barnraise.spec import TextSpec
from barnraise.text.held_out import find_smallest
from barnraise.text.places import PathPlace
from barnraise.text.reading import open_source
from barnraise.text.shards import TextPlan, build_shards, split_pieces
from barnraise.text.spool import BLOCK, DIGEST_DTYPE, LAST_FLAG, LENGTH_MASK, DocumentSpool
from barnraise.training.preparation import fill_spool

RUN = "01890000-0000-7000-8000-000000000000"
VOCABULARY = 16_384
WORDS = 60_000
DOCUMENT_WORDS = 330
BASELINE_BYTES = 48 << 20


def generate(path: Path, size: int) -> None:
    """Write JSON lines until the file has `size` bytes."""
    generator = np.random.default_rng(0)
    letters = np.array(list("aaabcdeeeefghiijklmnooprsttuuvwxyz"))
    words = np.array(
        ["".join(generator.choice(letters, n)) for n in generator.integers(2, 10, WORDS)]
    )
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            chosen = np.minimum(generator.zipf(1.2, 200 * DOCUMENT_WORDS), WORDS) - 1
            for begin in range(0, len(chosen), DOCUMENT_WORDS):
                text = " ".join(words[chosen[begin : begin + DOCUMENT_WORDS]])
                file.write(json.dumps({"text": text}) + "\n")


class MemoryWatch:
    """Sample the resident memory of this process and its children.

    Attributes:
        peak: the most bytes so far, of private and shared pages together.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        process = psutil.Process()
        while not self._stopped.wait(0.2):
            total = 0
            for one in (process, *process.children(recursive=True)):
                try:
                    info = one.memory_full_info()
                except psutil.Error:  # it has just ended
                    continue
                total += info.uss
            self.peak = max(self.peak, total)


def read_baseline(spool: DocumentSpool) -> Iterator[list[str]]:
    """Yield batches of 1 MiB of the spool's pieces."""
    batch: list[str] = []
    size = 0
    with spool.open_content() as content:
        pieces = spool.pieces
        for length in (pieces.read(0, len(pieces)) & LENGTH_MASK).tolist():
            batch.append(content.read(length).decode())
            size += length
            if size >= 1 << 20:
                yield batch
                batch = []
                size = 0


def measure_baseline(spool: DocumentSpool, tokenizer: Tokenizer) -> tuple[float, float]:
    """Return the MB/s of `encode_batch_fast` alone, by the clock and by CPU time.

    It uses all cores by itself.
    """
    done = 0
    seconds = 0.0
    cpu = 0.0
    for batch in read_baseline(spool):
        started = time.perf_counter()
        cpu_started = cpu_seconds()
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        seconds += time.perf_counter() - started
        cpu += cpu_seconds() - cpu_started
        done += sum(map(len, batch))
        if done >= BASELINE_BYTES:
            break
    return done / 1e6 / seconds, done / 1e6 / cpu


def main() -> None:
    """Generate, read, tokenise, compare; print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--tokenizer", choices=("bpe", "bytes"), default="bpe")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--text", type=Path, help="JSON lines; generated if it is not there yet")
    parser.add_argument(
        "--documents", type=int, help="measure only the table of so many documents of 2 kB"
    )
    arguments = parser.parse_args()
    if arguments.documents:
        print(json.dumps(measure_table(arguments.documents, arguments.folder)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        path = arguments.text or folder / "text.jsonl"
        if not path.exists():
            generate(path, arguments.megabytes * 10**6)
        figures: dict[str, object] = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "text_mb": round(path.stat().st_size / 1e6),
        }
        with MemoryWatch() as memory:
            figures |= measure(path, folder, arguments.tokenizer, memory)
        figures["peak_mb"] = round(memory.peak / 1e6)
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        figures["largest_process_mb"] = round(
            max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1e3
        )
    print(json.dumps(figures))


def measure_table(documents: int, parent: Path | None) -> dict[str, object]:
    """Split a text that exists only as the lengths and digests of its documents.

    The memory that grows with a text is that of this table, so 50 GB need not be there.
    """
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=parent) as name:
        spool = DocumentSpool(Path(name) / "spool")
        spool.finish()
        with (
            (spool.folder / "digests.bin").open("wb") as digests,
            (spool.folder / "pieces.bin").open("wb") as pieces,
        ):
            for begin in range(0, documents, BLOCK):
                block = np.zeros(min(BLOCK, documents - begin), DIGEST_DTYPE)
                block["high"] = random.integers(0, 2**64, len(block), dtype=np.uint64)
                block["pieces"] = 1
                block.tofile(digests)
                lengths = random.integers(1000, 3000, len(block), dtype=np.uint32)
                (lengths | np.uint32(LAST_FLAG)).tofile(pieces)
        del block, lengths
        started = time.perf_counter()
        with MemoryWatch() as memory:
            before = psutil.Process().memory_full_info().uss
            plan = TextPlan(TextSpec(tokenizer="bytes"), 256, RUN)
            table, held_out = split_pieces(spool, plan)
            sample = find_smallest(table.keys, table.used & ~held_out, 64_000)
            table.find_offsets(sample)
            text_gb = table.used_bytes / 1e9
    return {
        "documents": documents,
        "text_gb": round(text_gb, 1),
        "held_out_documents": int(held_out.sum()),
        "before_mb": round(before / 1e6),
        "peak_mb": round(memory.peak / 1e6),
        "bytes_a_document": round((memory.peak - before) / documents, 1),
        "seconds": round(time.perf_counter() - started, 1),
    }


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(path: Path, folder: Path, kind: str, memory: MemoryWatch) -> dict[str, object]:
    """Read and tokenise a file of text; return the figures."""
    blobs: dict[str, int] = {}
    tokenizer_files: list[bytes] = []

    def store_blob(data: bytes) -> str:
        digest = blake3(data).hexdigest()
        blobs[digest] = len(data)
        if data.startswith(b"{"):
            tokenizer_files.append(data)
        return digest

    started = time.perf_counter()
    with open_source([PathPlace(path)]) as source:
        spool = DocumentSpool(folder / "spool", source.fingerprint())
        fill_spool(spool, source)
    reading = time.perf_counter() - started
    times: dict[str, float] = {}

    def record(stage: str, done: int, total: int) -> None:
        times.setdefault("begin", time.perf_counter())
        times.setdefault("cpu_begin", cpu_seconds())
        times["end"] = time.perf_counter()

    text = TextSpec(tokenizer=kind)
    vocabulary = VOCABULARY if kind == "bpe" else 256
    manifest = build_shards(spool, TextPlan(text, vocabulary, RUN), store_blob, record)
    cpu_end = cpu_seconds()
    size = (spool.folder / "documents.bin").stat().st_size
    tokenising = size / 1e6 / (times["end"] - times["begin"])
    figures: dict[str, object] = {
        "reading_mb_per_second": round(size / 1e6 / reading, 1),
        "tokenising_mb_per_second": round(tokenising, 2),
        "tokens": sum(shard.tokens for shard in manifest.train),
        "shards": len(manifest.train),
    }
    if kind == "bytes":
        return figures
    own_cpu = size / 1e6 / (cpu_end - times["cpu_begin"])
    tokenizer = Tokenizer.from_str(tokenizer_files[0].decode())
    tokenizer.encode_special_tokens = True
    memory_before_baseline = memory.peak
    baseline, baseline_cpu = measure_baseline(spool, tokenizer)
    memory.peak = memory_before_baseline
    return figures | {
        "plain_tokenizers_mb_per_second": round(baseline, 2),
        "ratio": round(tokenising / baseline, 2),
        "mb_per_cpu_second": round(own_cpu, 2),
        "plain_mb_per_cpu_second": round(baseline_cpu, 2),
        "cpu_ratio": round(own_cpu / baseline_cpu, 2),
    }


if __name__ == "__main__":
    main()
