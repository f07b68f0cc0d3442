"""Turn text into the token files that training reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \\
        --append-eod

Writes ``{output-prefix}_{key}_{document|sentence}.bin`` and ``.idx`` for every JSON key, and
``....tokenizer.json``, by which training checks that its tokenizer is the one that made the data.
With ``--partitions``, an interrupted run continues after its last finished partition when it is
started again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not
if __name__ == "__main__":  # no threads of numpy before workers are forked
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from megatron.training.arguments.tokenizer_flags import _add_tokenizer_args
from megatron.training.preprocess.cli import (
    add_backend_argument,
    add_format_arguments,
    record_format,
    run_tool,
    tokenizer_of,
)
from megatron.training.preprocess.run import PreprocessOptions, preprocess
from megatron.training.process.user_code import parse_tool_args


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_tokenizer_args(parser)
    group = parser.add_argument_group("input data")
    group.add_argument(
        "--input",
        required=True,
        help="JSON lines or text, plain, .gz or .zst, or Parquet: a file, or a quoted pattern of "
        "several",
    )
    add_format_arguments(group)
    group.add_argument("--split-sentences", action="store_true", help="a sequence per sentence")
    group.add_argument("--keep-newlines", action="store_true", help="when splitting sentences")
    group = parser.add_argument_group("tokenization process")
    group.add_argument("--append-eod", action="store_true", help="end every document with EOD")
    group.add_argument("--lang", default="english", help="language of the sentences")
    add_backend_argument(parser)
    group = parser.add_argument_group("output data")
    group.add_argument("--output-prefix", required=True, help="path of the files, without suffix")
    group = parser.add_argument_group("runtime")
    group.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="processes that encode; one for each core if not given",
    )
    group.add_argument(
        "--partitions", type=int, default=1, help="parts that are finished one after the other"
    )
    group.add_argument("--log-interval", type=int, default=1000, help="documents between lines")
    group.add_argument(
        "--keep-sequential-samples",
        action="store_true",
        help="partitions are runs of documents; else documents are dealt to them in turn",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = parse_tool_args(get_parser, argv)
    preprocess(PreprocessOptions.of(args, record_format(args)), tokenizer_of(args))


if __name__ == "__main__":
    sys.exit(run_tool(main))
