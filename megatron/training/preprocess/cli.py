"""Command-line arguments and start-up that the data tools share."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence

from megatron.core.config.errors import MegatronError
from megatron.training.preprocess.documents import SEPARATORS, RecordFormat
from megatron.training.process.exit_report import exit_code
from megatron.training.tokenizer.base import MegatronTokenizer, TokenizerSpec
from megatron.training.tokenizer.fast import BACKENDS
from megatron.training.tokenizer.tokenizer import create_tokenizer


def add_backend_argument(parser: argparse.ArgumentParser) -> None:
    """Add --tokenizer-backend, which Megatron-LM does not have."""
    parser.add_argument(
        "--tokenizer-backend",
        choices=BACKENDS,
        default="auto",
        help="library that encodes a byte-level BPE: auto takes gigatoken if it is installed and "
        "its ids equal those of the tokenizer's own library (owner)",
    )


def add_format_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of input formats; Megatron-LM has --json-keys alone."""
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys (Parquet: columns) whose text is read",
    )
    group.add_argument(
        "--input-format",
        choices=("auto", "jsonl", "text"),
        default="auto",
        help="auto: files named .txt (.txt.gz, .txt.zst) are text, all others JSON lines",
    )
    group.add_argument(
        "--sample-by",
        choices=tuple(SEPARATORS),
        default="line",
        help="what a document is in text: a line, a paragraph (blank lines part them), a file",
    )


def record_format(args: argparse.Namespace) -> RecordFormat:
    """Return the format that the flags of ``add_format_arguments`` select."""
    plain = {"auto": None, "jsonl": False, "text": True}[args.input_format]
    return RecordFormat(tuple(args.json_keys), args.sample_by, plain)


def tokenizer_of(args: argparse.Namespace) -> MegatronTokenizer:
    """Build the tokenizer that the flags select."""
    print(f"> building {args.tokenizer_type} tokenizer ...", file=sys.stderr, flush=True)
    return create_tokenizer(TokenizerSpec.of(args))


def run_tool(tool: Callable[[Sequence[str] | None], None], parallelism: str = "false") -> int:
    """Run ``tool`` and return the exit code.

    Errors that the user can correct are printed without a traceback.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    # Workers are processes: threads of the library inside each would share the same cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", parallelism)
    try:
        tool(None)
    except (MegatronError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130
    return 0
