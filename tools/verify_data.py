"""Verify token files against their checksums, or write checksums for files that have none.

    python tools/verify_data.py data/a_text_document data/b_text_document
    python tools/verify_data.py --write data/written_by_another_program

Reports each damaged block of .bin with the documents in it. Exit status: 0 if all data is intact, 1
if any is damaged or has no checksums.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

from megatron.core.config.errors import DataError
from megatron.core.datasets.indexed_format import (
    BLOCK_BYTES,
    Checksums,
    SequenceIndex,
    get_bin_path,
    get_crc_path,
    get_idx_path,
    read_blocks,
)
from megatron.training.preprocess.cli import run_tool


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="path without .bin or .idx")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write PREFIX.crc from the present files, also where there is one; only their "
        "structure is checked",
    )
    return parser


def write_checksums(prefix: str) -> str:
    """Write ``prefix.crc``; return a message about it."""
    index = SequenceIndex(get_idx_path(prefix), multimodal=False)
    index.check_arrays(get_bin_path(prefix), os.path.getsize(get_bin_path(prefix)))
    checksums = Checksums.of_files(prefix)
    checksums.write(prefix)
    return f"{get_crc_path(prefix)}: wrote the checksums of {len(checksums.blocks)} blocks"


def damages(prefix: str) -> Iterator[str]:
    """Yield one sentence for each problem of the files of ``prefix``."""
    bin_path = get_bin_path(prefix)
    checksums = Checksums.read(prefix)
    if checksums is None:
        raise DataError(
            f"{prefix}: no checksums ({get_crc_path(prefix)} is missing); write them with --write"
        )
    bin_bytes = os.path.getsize(bin_path)
    index: SequenceIndex | None = None
    try:
        index = SequenceIndex(get_idx_path(prefix), multimodal=False)
        checksums.check(prefix, bin_bytes, index.num_bytes, index.data())
        index.check_arrays(bin_path, bin_bytes)
    except DataError as error:
        yield str(error)
        index = None
    for first_block, piece in read_blocks(bin_path):
        for block in checksums.wrong_blocks(first_block, piece):
            start = block * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, bin_bytes)
            inside = "" if index is None else f": {documents_in(index, start, end)}"
            yield f"{bin_path}, bytes {start} to {end}, is damaged{inside}"


def documents_in(index: SequenceIndex, start: int, end: int) -> str:
    """Return which documents, numbered from 0, have tokens in bytes [start, end) of .bin."""
    pointers = index.sequence_pointers
    first = max(int(np.searchsorted(pointers, start, "right")) - 1, 0)
    last = int(np.searchsorted(pointers, end, "left")) - 1
    if int(pointers[first]) + int(index.sequence_lengths[first]) * index.dtype_size <= start:
        first += 1
    if first > last:
        return "no document"
    both = np.searchsorted(index.document_indices, [first, last], "right") - 1
    return f"documents {both[0]} to {both[1]} (sequences {first} to {last})"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; raises DataError, hence status 1, if anything is damaged."""
    args = get_parser().parse_args(argv)
    num_wrong = 0
    for prefix in args.prefixes:
        try:
            if args.write:
                print(write_checksums(prefix))
                continue
            found = 0
            for sentence in damages(prefix):
                print(sentence, flush=True)
                found += 1
            num_wrong += found > 0
            if not found:
                print(f"{prefix}: intact")
        except (DataError, OSError) as error:
            print(error)
            num_wrong += 1
    if num_wrong:
        raise DataError(f"{num_wrong} of {len(args.prefixes)} data sets failed")


if __name__ == "__main__":
    sys.exit(run_tool(main))
