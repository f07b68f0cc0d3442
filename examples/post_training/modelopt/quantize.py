"""Calibrate a Hugging Face folder or a checkpoint, write the quantized checkpoint, and try it.

    torchrun --nproc-per-node 2 examples/post_training/modelopt/quantize.py \\
        --tensor-model-parallel-size 2 --pretrained-model-path HF_FOLDER --save QUANTIZED \\
        --export-quant-cfg fp8 --calib-data texts.jsonl --calib-size 512

The calibration samples are rows of --calib-data, or training samples of --data-path.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.post_training.modelopt.common import (
    add_model_path,
    only_weights,
    open_llm,
    parse,
    print_rank_0,
    run,
)
from megatron.core.config.errors import ConfigError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.post_training import quantization
from megatron.training.initialize import configure, connect, shut_down

LENGTH = 32  # tokens of an answer


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of calibration and Megatron-LM's flags of quantization."""
    quantization.add_flags(parser)
    group = parser.add_argument_group("quantization")
    add_model_path(group)
    group.add_argument(
        "--prompts",
        default="Hello!|Born in California, Soyer trained as a",
        help="texts that the quantized model continues, separated by |; empty: none",
    )
    group.add_argument(
        "--references", default="", help="their expected continuations, separated by |"
    )
    group.add_argument("--skip-generate", action="store_true", help="write no texts at the end")
    group.add_argument(
        "--force-all-expert-routing",
        action="store_true",
        help="send each calibration token to all experts, so that each of them gets tokens",
    )


def pairs_of(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the prompts with their references, "" for none.  Raises ConfigError."""
    prompts = args.prompts.split("|") if args.prompts else []
    references = args.references.split("|") if args.references else [""] * len(prompts)
    if len(references) != len(prompts):
        raise ConfigError(
            f"--references {args.references}: there are {len(references)}, and --prompts has "
            f"{len(prompts)} texts: give one for each"
        )
    return list(zip(prompts, references, strict=True))


def main() -> None:
    """Calibrate, save, and generate with what was saved."""
    args = parse(add_flags)
    pairs = pairs_of(args)
    only_weights(args)
    args.skip_train = True
    config = configure(parsed_args=args)
    connect(config)
    quantization.quantize_checkpoint(config, uses_all_experts=args.force_all_expert_routing)
    shut_down()
    if not pairs or args.skip_generate:
        return
    params = SamplingParams(top_k=1, num_tokens_to_generate=LENGTH)
    with ExitStack() as watch:
        llm = open_llm(args, watch, written=args.save)
        answers = llm.generate([prompt for prompt, _ in pairs], params)
    llm.shut_down()
    wrong = []
    for answer, (prompt, reference) in zip(answers, pairs, strict=False):  # rank 0 has answers
        print_rank_0(f"{prompt!r} -> {answer.text!r}")
        if reference and answer.text != reference:
            wrong.append(reference)
    if wrong:
        raise SystemExit(f"--references: these are not the texts of the quantized model: {wrong}")


if __name__ == "__main__":
    run(main)
