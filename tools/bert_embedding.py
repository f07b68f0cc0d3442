"""Write one vector per text of a corpus: the mean of BERT's last hidden states over the text.

    python tools/bert_embedding.py --load DIR --input texts.jsonl --output vectors.npy
    torchrun --nproc-per-node 2 tools/bert_embedding.py --load DIR --input PREFIX --output v.npy

The input is JSON lines or text, plain, .gz or .zst, or the prefix of an indexed dataset; each
document is a row of the float32 array.  Padding, [CLS] and [SEP] are excluded from the mean.  An
interrupted run that is started again continues where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config.errors import ConfigError
from megatron.inference.embedding import (
    Corpus,
    huggingface_embedder,
    megatron_embedder,
    write_vectors,
)
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.initialize import shut_down
from megatron.training.preprocess.cli import add_format_arguments, record_format, run_tool
from megatron.training.process.rank_print import is_rank0
from megatron.training.process.user_code import parse_tool_args


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--load", required=True, help="a checkpoint, or a Hugging Face folder")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load; default: the newest")
    parser.add_argument(
        "--bert-embedder-type",
        choices=("megatron", "huggingface"),
        default="megatron",
        help="what --load holds: a checkpoint of training, or a folder of Hugging Face",
    )
    parser.add_argument("--output-bert-embeddings", action="store_true", help="what it always does")
    parser.add_argument("--input", required=True, help="file of documents, or indexed dataset")
    parser.add_argument("--output", required=True, help="the .npy that is written")
    parser.add_argument("--micro-batch-size", type=int, default=32, help="texts at once")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add_format_arguments(parser.add_argument_group("input data"))
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = parse_tool_args(get_parser, argv)
    if args.micro_batch_size < 1:
        raise ConfigError(f"--micro-batch-size {args.micro_batch_size}: at least 1 is needed")
    if len(args.json_keys) > 1:
        raise ConfigError(
            f"--json-keys {' '.join(args.json_keys)}: one text a vector, give one key"
        )
    source = args.load
    if args.bert_embedder_type == "huggingface":
        embedder = huggingface_embedder(args.load, device_kind=args.device)
    else:
        embedder = megatron_embedder(args.load, step=args.ckpt_step, device_kind=args.device)
        source = open_checkpoint(args.load, args.ckpt_step).folder
    corpus = Corpus(args.input, record_format(args), embedder)
    origin = f"{args.bert_embedder_type} {source} {args.input} {' '.join(args.json_keys)}"
    kept = write_vectors(
        corpus, embedder, args.output, batch_size=args.micro_batch_size, origin=origin
    )
    if is_rank0():
        words = f", {kept} of them by an earlier run" if kept else ""
        print(f"{args.output}: {len(corpus)} vectors of {embedder.width} numbers{words}")
    if args.bert_embedder_type == "megatron":
        shut_down()


if __name__ == "__main__":
    sys.exit(run_tool(main))
