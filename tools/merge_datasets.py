"""Concatenate the token files of a directory, sorted by name, into one pair.

    python tools/merge_datasets.py --input parts/ --output-prefix all_text_document

Memory does not grow with the number of files or their size.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.indexed_format import SequenceIndex, get_bin_path, get_idx_path
from megatron.training.preprocess.cli import run_tool
from megatron.training.tokenizer.fingerprint import Fingerprint, read_fingerprint


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("input data")
    group.add_argument("--input", required=True, help="directory of .bin and .idx files")
    group = parser.add_argument_group("output data")
    group.add_argument("--output-prefix", required=True, help="path of the result, without suffix")
    group = parser.add_argument_group("miscellaneous")
    group.add_argument("--multimodal", action="store_true", help="the files hold modes")
    return parser


def merge(directory: str, output_prefix: str, multimodal: bool) -> list[str]:
    """Write ``output_prefix.bin/.idx``; return the prefixes that it joins, in order."""
    prefixes = _prefixes(directory)
    if os.path.abspath(output_prefix) in map(os.path.abspath, prefixes):
        raise ConfigError(
            f"--output-prefix {output_prefix} is one of the files in --input {directory}; "
            "write the result somewhere else"
        )
    if not os.path.isdir(os.path.dirname(os.path.abspath(output_prefix))):
        raise ConfigError(f"--output-prefix {output_prefix}: its directory does not exist; make it")
    fingerprint = _common_fingerprint(prefixes)
    dtype = SequenceIndex(get_idx_path(prefixes[0]), multimodal).dtype
    builder = IndexedDatasetBuilder(get_bin_path(output_prefix), dtype, multimodal)
    for prefix in prefixes:
        builder.add_index(prefix)
    builder.finalize(get_idx_path(output_prefix))
    if fingerprint is not None:
        fingerprint.write(output_prefix)
    return prefixes


def _prefixes(directory: str) -> list[str]:
    """Return sorted prefixes.  Raises DataError if a file of a pair is missing."""
    if not os.path.isdir(directory):
        raise ConfigError(f"--input {directory} is no directory; name one with .bin and .idx files")
    found = {os.path.splitext(name) for name in os.listdir(directory)}
    stems = {stem for stem, extension in found if extension in (".bin", ".idx")}
    if not stems:
        raise DataError(f"--input {directory} holds no .bin and .idx files")
    for stem in sorted(stems):
        for extension, other in ((".bin", ".idx"), (".idx", ".bin")):
            if (stem, extension) not in found:
                raise DataError(
                    f"{os.path.join(directory, stem)}{extension} is missing, the {other} is there; "
                    "preprocess that part again"
                )
    return [os.path.join(directory, stem) for stem in sorted(stems)]


def _common_fingerprint(prefixes: Sequence[str]) -> Fingerprint | None:
    """Return the tokenizer fingerprint of all parts; None if a part has none.

    Raises DataError if two parts have different ones.
    """
    first: tuple[str, Fingerprint] | None = None
    complete = True
    for prefix in prefixes:
        found = read_fingerprint(prefix)
        if found is None:
            complete = False
        elif first is None:
            first = prefix, found
        elif found.sha256 != first[1].sha256:
            raise DataError(
                f"{first[0]} was written with {first[1]}, {prefix} with {found}: "
                "ids of two tokenizers do not mix; preprocess one of them again"
            )
    return first[1] if first is not None and complete else None


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = get_parser().parse_args(argv)
    prefixes = merge(args.input, args.output_prefix, args.multimodal)
    print(f"> merged {len(prefixes)} data sets into {args.output_prefix}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_tool(main))
