"""Turn one side of a parallel text, a sentence a line, into token files.

    python tools/preprocess_data_nmt.py --input train.de --output-prefix train_de \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model de.model

Sequence n of ``{output-prefix}.bin/.idx`` is line n, so that two sides stay aligned: an empty
line, or one without a token, is an error.
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
from megatron.training.preprocess.cli import add_backend_argument, run_tool, tokenizer_of
from megatron.training.preprocess.documents import RecordFormat
from megatron.training.preprocess.run import PreprocessOptions, preprocess
from megatron.training.process.user_code import parse_tool_args


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("input data")
    group.add_argument("--input", required=True, help="text file, a sentence on every line")
    _add_tokenizer_args(parser)
    add_backend_argument(parser)
    group = parser.add_argument_group("output data")
    group.add_argument("--output-prefix", required=True, help="path of the files, without suffix")
    group = parser.add_argument_group("runtime")
    group.add_argument("--workers", type=int, default=1, help="processes that encode")
    group.add_argument("--log-interval", type=int, default=100, help="sentences between lines")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = parse_tool_args(get_parser, argv)
    record_format = RecordFormat(plain_text=True, empty_is_error=True)
    options = PreprocessOptions.of(args, record_format, key_in_name=False)
    preprocess(options, tokenizer_of(args))


if __name__ == "__main__":
    sys.exit(run_tool(main))
