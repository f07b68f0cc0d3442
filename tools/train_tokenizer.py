"""Train a tokenizer on the files that preprocess_data.py reads.

    python tools/train_tokenizer.py --input corpus.jsonl --output-dir tok --vocab-size 50257
    python tools/preprocess_data.py ... --tokenizer-type GPT2BPETokenizer \\
        --vocab-file tok/vocab.json --merge-file tok/merges.txt

bpe writes ``vocab.json``, ``merges.txt`` and ``tokenizer.json``; sentencepiece writes
``tokenizer.model`` and ``tokenizer.vocab``; wordpiece writes ``vocab.txt``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

from megatron.training.preprocess.cli import add_format_arguments, record_format, run_tool
from megatron.training.preprocess.train import (
    END_OF_TEXT,
    TrainingOptions,
    train_bpe,
    train_sentencepiece,
    train_wordpiece,
)


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("input data")
    group.add_argument(
        "--input",
        required=True,
        help="JSON lines or text, plain, .gz or .zst: a file, or a quoted pattern of several",
    )
    add_format_arguments(group)
    group.add_argument("--max-bytes", type=int, help="learn from the first so many bytes of input")
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model-type",
        choices=("bpe", "sentencepiece", "sentencepiece-unigram", "wordpiece", "wordpiece-cased"),
        default="bpe",
        help="byte-level BPE as GPT-2's, a SentencePiece model as Llama 2's, or word pieces as "
        "BERT's (default: bpe)",
    )
    group.add_argument("--vocab-size", type=int, required=True, help="ids, special ones included")
    group.add_argument(
        "--special-tokens", nargs="*", help="words that stay one id; wordpiece has BERT's besides"
    )
    group.add_argument(
        "--min-frequency", type=int, default=2, help="a pair seen less often is not merged (bpe)"
    )
    group = parser.add_argument_group("output data")
    group.add_argument("--output-dir", required=True, help="directory of the tokenizer's files")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = get_parser().parse_args(argv)
    is_wordpiece = args.model_type.startswith("wordpiece")
    if args.special_tokens is None:
        args.special_tokens = [] if is_wordpiece else [END_OF_TEXT]
    options = TrainingOptions(
        input=args.input,
        output_dir=args.output_dir,
        record_format=record_format(args),
        vocab_size=args.vocab_size,
        special_tokens=args.special_tokens,
        min_frequency=args.min_frequency,
        max_bytes=args.max_bytes,
    )
    if args.model_type == "bpe":
        written = train_bpe(options)
    elif is_wordpiece:
        written = train_wordpiece(options, lower_case=args.model_type == "wordpiece")
    else:
        kind = "unigram" if args.model_type.endswith("unigram") else "bpe"
        written = train_sentencepiece(options, kind)
    print("> wrote " + ", ".join(written), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_tool(main, parallelism="true"))  # one process: the library may use every core
