"""Compare the speed of preprocess_data.py, from the command to the files on disk, with peers.

    python benchmarks/preprocess.py                 # makes 40 MB of text and a 50k BPE of it
    python benchmarks/preprocess.py --corpus my.jsonl --workers 1 2

Contenders run in their own processes, imports included, and alternate; the table has medians.  The
row of a contender is void if its .bin or .idx differs from ours.  "one encode a document" works as
Megatron-LM does: workers of a multiprocessing pool call the tokenizer of ``transformers`` (or the
faster one of ``tokenizers``) for each document and send Python lists back.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT_CHARACTERS = 3000
CORPUS_BYTES = 40_000_000
VOCAB_SIZE = 50257
OURS = {"ours": "auto", "ours, tokenizers alone": "owner"}
REFERENCE = "one encode a document (transformers)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, help="JSON lines with a text; default: made")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "bench-preprocess")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        PEERS[args.contender](args.corpus, args.directory, args.workers[0])
        return
    args.directory.mkdir(parents=True, exist_ok=True)
    corpus = args.corpus or make_corpus(args.directory)
    train_tokenizer(corpus, args.directory)
    megabytes = corpus.stat().st_size / 1e6
    print(f"{corpus}: {megabytes:.1f} MB of JSON lines, {os.cpu_count()} cores")
    for workers in args.workers:
        report(measure(corpus, args.directory, workers, args.rounds), megabytes, workers)


def measure(
    corpus: Path, directory: Path, workers: int, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Return per contender, of every round: seconds, CPU seconds and digest of its files."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*OURS, *PEERS)}
    for _, name in itertools.product(range(rounds), found):
        command = command_of(name, corpus, directory, workers)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started_at_s = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        elapsed_s = time.monotonic() - started_at_s
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr}")
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found[name].append({"s": elapsed_s, "cpu_s": cpu_s, "digest": digest(directory)})
    return found


def command_of(name: str, corpus: Path, directory: Path, workers: int) -> list[str]:
    if name not in OURS:
        command = [sys.executable, __file__, "--contender", name, "--corpus", str(corpus)]
        return [*command, "--workers", str(workers), "--directory", str(directory)]
    return [
        *(sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--append-eod"),
        *("--input", str(corpus), "--output-prefix", str(directory / "out")),
        *("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(directory / "vocab.json")),
        *("--merge-file", str(directory / "merges.txt"), "--workers", str(workers)),
        *("--tokenizer-backend", OURS[name]),
    ]


def report(found: dict[str, list[dict[str, Any]]], megabytes: float, workers: int) -> None:
    reference_s = statistics.median(turn["s"] for turn in found[REFERENCE])
    wanted = found["ours"][0]["digest"]
    print(f"\n{workers} worker(s)\n")
    reference_cpu_s = statistics.median(turn["cpu_s"] for turn in found[REFERENCE])
    print("| contender | seconds | CPU seconds | MB/s | speed-up | in CPU time | same bytes |")
    print("|---|---|---|---|---|---|---|")
    for name, turns in found.items():
        seconds = statistics.median(turn["s"] for turn in turns)
        cpu_s = statistics.median(turn["cpu_s"] for turn in turns)
        same = "yes" if all(turn["digest"] == wanted for turn in turns) else "NO: void"
        print(
            f"| {name} | {seconds:.2f} | {cpu_s:.2f} | {megabytes / seconds:.1f} | "
            f"{reference_s / seconds:.1f} | {reference_cpu_s / cpu_s:.1f} | {same} |"
        )


def digest(directory: Path) -> str:
    """Return a digest of the files that the last contender wrote, and remove them."""
    found = hashlib.sha256()
    for extension in ("bin", "idx"):
        path = directory / f"out_text_document.{extension}"
        found.update(path.read_bytes())
        path.unlink()
    return found.hexdigest()


# Peers.  Each reads the corpus and writes out_text_document.bin/.idx.


def one_encode_per_document(encode: Callable[[Path], Callable[[str], list[int]]]) -> Any:
    """Encode as Megatron-LM does: a pool, one call per document, lists through a pipe."""

    def run(corpus: Path, directory: Path, workers: int) -> None:
        start = (encode, directory)
        with (
            open(corpus, encoding="utf-8") as lines,
            multiprocessing.Pool(workers, initializer=_load, initargs=start) as pool,
        ):
            write(directory, pool.imap(_encode_line, lines, 32))

    return run


_encode: Callable[[str], list[int]]


def _load(encode: Callable[[Path], Callable[[str], list[int]]], directory: Path) -> None:
    global _encode
    _encode = encode(directory)


def _encode_line(line: str) -> list[int]:
    return _encode(json.loads(line)["text"])


def transformers_call(directory: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    return lambda text: tokenizer(text).input_ids


def tokenizers_call(directory: Path) -> Callable[[str], list[int]]:
    tokenizer = load_tokenizers(directory)
    return lambda text: tokenizer.encode(text).ids


def tokenizers_batch(corpus: Path, directory: Path, workers: int) -> None:
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    tokenizer = load_tokenizers(directory)
    batches = (tokenizer.encode_batch_fast(texts) for texts in texts_in_batches(corpus))
    write(directory, (row.ids for batch in batches for row in batch))


def load_tokenizers(directory: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def texts_in_batches(corpus: Path) -> Iterator[list[str]]:
    with open(corpus, encoding="utf-8") as lines:
        while texts := [json.loads(line)["text"] for line in itertools.islice(lines, 1000)]:
            yield texts


def write(directory: Path, rows: Iterable[list[int]]) -> None:
    eod = json.loads((directory / "vocab.json").read_text())["<|endoftext|>"]
    prefix = str(directory / "out_text_document")
    builder = IndexedDatasetBuilder(prefix + ".bin", np.uint16)
    for row in rows:
        if row:
            row = [*row, eod]
        builder.add_document(np.array(row, np.uint16), [len(row)] if row else [])
    builder.finalize(prefix + ".idx")


PEERS = {
    REFERENCE: one_encode_per_document(transformers_call),
    "one encode a document (tokenizers)": one_encode_per_document(tokenizers_call),
    "tokenizers, batch calls": tokenizers_batch,
}


# What is encoded.


def make_corpus(directory: Path) -> Path:
    """Write documents from the text of Python's standard library, varied to get enough of them."""
    path = directory / "corpus.jsonl"
    if path.exists():
        return path
    texts = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in file.parts:
            text = file.read_text(encoding="utf-8", errors="replace")
            starts = range(0, len(text), DOCUMENT_CHARACTERS)
            texts += [text[i : i + DOCUMENT_CHARACTERS] for i in starts]
    rng = random.Random(0)
    written = 0
    with open(path, "w", encoding="utf-8") as out:
        for turn in itertools.count():
            rng.shuffle(texts)
            for text in texts:
                line = json.dumps({"text": varied(text, rng) if turn else text}) + "\n"
                out.write(line)
                written += len(line)
                if written >= CORPUS_BYTES:
                    return path
    raise AssertionError("unreachable")


def varied(text: str, rng: random.Random) -> str:
    """Return the text with the letters of a random quarter of the long words shuffled."""
    words = text.split(" ")
    for index, word in enumerate(words):
        if len(word) > 4 and word.isalpha() and rng.random() < 0.25:
            words[index] = "".join(rng.sample(word, len(word)))
    return " ".join(words)


def train_tokenizer(corpus: Path, directory: Path) -> None:
    """Train a byte-level BPE on the corpus, unless it exists."""
    if (directory / "tokenizer.json").exists():
        return
    command = [sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), "--input", str(corpus)]
    command += ["--output-dir", str(directory), "--vocab-size", str(VOCAB_SIZE)]
    subprocess.run(command, check=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
