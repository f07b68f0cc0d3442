"""Answer the user's turns of conversations with a checkpoint or a Hugging Face folder, greedily.

    torchrun --nproc-per-node 2 examples/post_training/modelopt/generate.py \\
        --tensor-model-parallel-size 2 --load CHECKPOINT --osl 64
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.post_training.modelopt.common import (
    add_selection,
    draft_options,
    first,
    open_llm,
    parse,
    print_rank_0,
    rows_of,
    run,
    with_progress,
)
from megatron.core.datasets.conversations import Message, conversation_of, read_row
from megatron.core.inference.sampling_params import SamplingParams

DEFAULT = ({"role": "user", "content": "Explain in three sentences why the sky is blue."},)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add Megatron-LM's flags of generation."""
    group = parser.add_argument_group("generation")
    group.add_argument("--osl", type=int, default=128, help="tokens of an answer at most")
    group.add_argument(
        "--draft-length",
        type=int,
        default=0,
        help="tokens that the model's draft heads (or --inference-draft-model ngram) propose in a "
        "step; the text stays the same",
    )
    group.add_argument(
        "--draft-topk",
        type=int,
        default=1,
        help="without effect: drafts are the most probable tokens in sequence",
    )
    add_selection(group, "--finetune-hf-dataset")


def conversations(args: argparse.Namespace) -> Sequence[Sequence[Message]]:
    """Return the conversations of --finetune-hf-dataset, or one of our own.  Raises DataError."""
    if args.finetune_hf_dataset is None:
        return [DEFAULT]
    parts = rows_of(args.finetune_hf_dataset, args.finetune_data_split, "--finetune-hf-dataset")
    places = [(rows, i) for rows in parts for i in range(len(rows))]
    return [
        read_row(rows, i, lambda row: conversation_of(row).messages)
        for rows, i in first(places, args.percentage)
    ]


def main() -> None:
    """Answer each turn after the answers that the model gave before."""
    args = parse(add_flags)
    if args.draft_topk != 1:
        print_rank_0(
            f"WARNING: --draft-topk {args.draft_topk} is without effect: drafts are the most "
            "probable tokens in sequence"
        )
    chats = conversations(args)
    template = None if args.chat_template is None else Path(args.chat_template).read_text()
    params = SamplingParams(top_k=1, num_tokens_to_generate=args.osl)
    with ExitStack() as watch:
        llm = open_llm(args, watch, **draft_options(args, args.draft_length))
        for chat in with_progress(chats, "conversations", args):
            turns: list[Message] = []
            for message in chat:
                if message["role"] == "assistant":
                    continue  # the model's own answer stands in its place
                turns.append(message)
                if message["role"] != "user":
                    continue
                found = llm.chat(turns, params, chat_template=template)
                text = found[0].text if found else "-"  # rank 0 has the answer
                print_rank_0(f"{message}\n{text}")
                turns.append({"role": "assistant", "content": text})
        if llm.engine.stats().num_drafts:
            print_rank_0(llm.engine.stats().drafts)
    llm.shut_down()


if __name__ == "__main__":
    run(main)
