"""Measure how many tokens a step gives with draft heads, on prompts, at an unchanged text.

    python examples/post_training/modelopt/validate.py --load CHECKPOINT \\
        --prompts-path prompts.jsonl --steps 2 --osl 64 --save-ground-truth-path truth.pt

A line of the prompts is an object with ``prompt`` (a text), ``turns`` (of MT-Bench, of which the
first is used) or ``messages``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

import torch

from examples.post_training.modelopt.common import (
    draft_options,
    open_llm,
    parse,
    print_rank_0,
    run,
)
from megatron.core.config.errors import DataError
from megatron.core.datasets.conversations import messages_of, open_rows, read_all
from megatron.core.inference.sampling_params import SamplingParams
from megatron.training.process.rank_print import is_rank0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add Megatron-LM's flags of validation."""
    group = parser.add_argument_group("acceptance rate")
    group.add_argument("--osl", type=int, default=64, help="tokens of an answer at most")
    group.add_argument("--prompts-path", required=True, help="file of prompts in JSON lines")
    group.add_argument(
        "--ground-truth-path",
        help="tokens that --save-ground-truth-path has written, with which the answers must agree",
    )
    group.add_argument("--save-ground-truth-path", help="file for the tokens of the answers")
    group.add_argument(
        "--steps", type=int, default=1, help="tokens that draft heads propose in a step; 0: none"
    )


def prompt_of(row: Mapping[str, Any]) -> str | list[Any]:
    """Return the text or the messages of a row.  Raises DataError."""
    if row.get("messages") is not None:
        return list(messages_of(row["messages"], "messages"))
    turns = row.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else row.get("prompt")
    if not isinstance(text, str) or not text:
        raise DataError(f"a row needs prompt, turns or messages; this one has {', '.join(row)}")
    return text if turns is None else [{"role": "user", "content": text}]


def read_truth(path: str, number: int) -> list[list[int]]:
    """Return the tokens of ``number`` answers.  Raises DataError."""
    try:
        found = [[int(t) for t in tokens] for tokens in torch.load(path, weights_only=True)]
    except Exception as error:  # torch raises many types for a damaged file
        raise DataError(f"--ground-truth-path {path} cannot be read: {error!r:.200}") from None
    if len(found) != number:
        raise DataError(
            f"--ground-truth-path {path} has {len(found)} answers, and --prompts-path {number} "
            "prompts: give the file that was saved with these prompts"
        )
    return found


def main() -> None:
    """Answer the prompts with drafts, compare the answers and report the accepted tokens."""
    args = parse(add_flags)
    prompts = read_all(open_rows(args.prompts_path), prompt_of, "prompts")
    truth = None
    if args.ground_truth_path is not None:
        truth = read_truth(args.ground_truth_path, len(prompts))
    params = SamplingParams(top_k=1, num_tokens_to_generate=args.osl)
    answers = []
    with ExitStack() as watch:
        llm = open_llm(args, watch, **draft_options(args, args.steps))
        for prompt in prompts:
            answer = llm.generate if isinstance(prompt, str) else llm.chat
            answers += [[t.token for t in a.tokens] for a in answer(prompt, params)]
        stats = llm.engine.stats()
    llm.shut_down()
    if not is_rank0():
        return
    if truth is not None:
        wrong = [i for i, tokens in enumerate(answers) if tokens != truth[i][: args.osl]]
        if wrong:
            raise DataError(
                f"--ground-truth-path {args.ground_truth_path}: the answers to prompts "
                f"{', '.join(str(i + 1) for i in wrong[:5])} differ: is it of another model?"
            )
        print_rank_0(f"all {len(answers)} answers equal the ground truth")
    if args.save_ground_truth_path is not None:
        torch.save([torch.tensor(tokens) for tokens in answers], args.save_ground_truth_path)
    total = sum(map(len, answers))
    steps = total - stats.num_accepted_drafts
    print_rank_0(
        f"acceptance rate: {total / max(steps, 1):.3f} tokens in a step ({total} tokens, {steps} "
        f"steps, {stats.num_accepted_drafts} of {stats.num_drafts} drafts accepted)"
    )


if __name__ == "__main__":
    run(main)
