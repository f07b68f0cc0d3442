"""What the command lines of the data tools share."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence

from megatron.core.config.errors import MegatronError
from megatron.training.preprocess.documents import RecordFormat
from megatron.training.preprocess.inputs import SAMPLE_BY
from megatron.training.tokenizer.base import MegatronTokenizer
from megatron.training.tokenizer.build import TOKENIZER_TYPES, create_tokenizer
from megatron.training.tokenizer.fast import BACKENDS
from megatron.training.tokenizer.spec import TokenizerSpec


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """The tokenizer group of the training programs, as far as data needs it."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--vocab-size", type=int, help="ids of NullTokenizer and TikTokenizer")
    group.add_argument("--padded-vocab-size", type=int, help="taken, and of no effect on data")
    group.add_argument("--vocab-file", help="vocab.json of a BPE, vocab.txt of a WordPiece")
    group.add_argument("--merge-file", help="merges.txt of a BPE")
    group.add_argument("--vocab-extra-ids", type=int, default=0, help="spare ids, for T5's spans")
    group.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="kind of tokenizer")
    group.add_argument(
        "--tokenizer-model", help="SentencePiece model, ranks, tokenizer.json or its directory"
    )
    group.add_argument("--tiktoken-pattern", help="how TikTokenizer cuts text: v1 or v2")
    group.add_argument(
        "--tiktoken-num-special-tokens", type=int, default=1000, help="ids before the ranks"
    )
    group.add_argument("--tiktoken-special-tokens", nargs="+", help="names of the first of them")


def add_backend_argument(parser: argparse.ArgumentParser) -> None:
    """Which library encodes; ours."""
    parser.add_argument(
        "--tokenizer-backend",
        choices=BACKENDS,
        default="auto",
        help="library that encodes a byte-level BPE: auto takes the fastest one here whose ids "
        "equal those of the tokenizer's own library (owner)",
    )


def add_format_arguments(group: argparse._ArgumentGroup) -> None:
    """How input is read; the first flag is the reference's, the others are ours."""
    group.add_argument("--json-keys", nargs="+", default=["text"], help="keys whose text is read")
    group.add_argument(
        "--input-format",
        choices=("auto", "jsonl", "text"),
        default="auto",
        help="auto: files named .txt (.txt.gz, .txt.zst) are text, all others JSON lines",
    )
    group.add_argument(
        "--sample-by",
        choices=SAMPLE_BY,
        default="line",
        help="what a document is in text: a line, a paragraph (blank lines part them), a file",
    )


def record_format(args: argparse.Namespace) -> RecordFormat:
    """From the flags of ``add_format_arguments``."""
    plain = {"auto": None, "jsonl": False, "text": True}[args.input_format]
    return RecordFormat(tuple(args.json_keys), args.sample_by, plain)


def tokenizer_of(args: argparse.Namespace) -> MegatronTokenizer:
    """Build the tokenizer that the flags name."""
    print(f"> building {args.tokenizer_type} tokenizer ...", file=sys.stderr, flush=True)
    return create_tokenizer(TokenizerSpec.of(args))


def run_tool(tool: Callable[[Sequence[str] | None], None], parallelism: str = "false") -> None:
    """Run ``tool``; what the user can put right is printed without a traceback, exit code 1."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    # Workers are processes: threads of the library inside each would share the same cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", parallelism)
    try:
        tool(None)
    except MegatronError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
