"""Measure how fast a checkpoint generates: tokens per second, for random or given prompts.

    python tools/run_inference_performance_test.py --load DIR --num-input-tokens 64 \
        --num-tokens-to-generate 32 --inference-max-requests 8

The flags are those of Megatron-LM's tool; model and tokenizer come from the checkpoint.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import pstats
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config.errors import ConfigError, MegatronError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference import LLM
from megatron.inference.engine_flags import engine_options, generation_layout
from megatron.inference.llm import Answer, Prompt
from megatron.training.arguments.parser import parse_args
from megatron.training.process.exit_report import exit_code
from megatron.training.process.rank_print import is_rank0


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this tool to those of the engine and the model."""
    group = parser.add_argument_group("text generation")
    group.add_argument("--prompts", nargs="+", metavar="TEXT", help="Texts to continue.")
    group.add_argument(
        "--num-input-tokens", type=int, help="Length of random prompts, in place of --prompts."
    )
    group.add_argument("--num-tokens-to-generate", type=int, default=30)
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument("--top_k", type=int, default=1)
    group.add_argument("--top_p", type=float, default=0.0)
    group.add_argument("--return-log-probs", action="store_true")
    group.add_argument("--top-n-logprobs", type=int, default=0)
    group.add_argument("--stream", action="store_true", help="Print the first text as it grows.")
    group.add_argument(
        "--engine-type",
        choices=("static", "dynamic"),
        default="static",
        help="static: at most --inference-max-requests at the same time; dynamic: as many as the "
        "KV cache holds.",
    )
    group.add_argument(
        "--model-provider",
        choices=("gpt", "mamba"),
        help="Ignored: the model is that of the checkpoint.",
    )
    group.add_argument(
        "--benchmark-profile", action="store_true", help="Print a profile of the host's work."
    )
    return parser


def main() -> None:
    """Generate twice, and report the second time, when all memory is allocated."""
    try:
        args = parse_args(add_flags)
        if args.load is None:
            raise ConfigError("--load is missing: give the directory that training saved to")
        if (args.prompts is None) == (args.num_input_tokens is None):
            raise ConfigError("give --prompts TEXT ... or --num-input-tokens N, one of them")
        args.inference_dynamic_batching |= args.engine_type == "dynamic"
        given = vars(args)
        llm = LLM.load(
            args.load,
            step=args.ckpt_step,
            device_kind=args.device,
            layout=generation_layout(args),
            # Both runs have the same prompts: shared pages would hide the cost of the second.
            options=dataclasses.replace(engine_options(args), has_prefix_cache=False),
            flags={name: given[name] for name in ("cache_mla_latents", "spec") if given[name]},
        )
        measure(llm, args)
        llm.shut_down()
    except (MegatronError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def measure(llm: LLM, args: argparse.Namespace) -> None:
    """Generate and print the rates on rank 0.  Collective over all ranks."""
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        return_log_probs=args.return_log_probs,
        top_n_logprobs=args.top_n_logprobs,
        num_tokens_to_generate=args.num_tokens_to_generate,
        seed=args.seed,
        ignore_eos=args.num_input_tokens is not None,
    )
    prompts = random_prompts(llm, args) if args.prompts is None else args.prompts
    if args.stream:
        for piece in llm.stream(prompts[0], params):
            print(piece, end="", flush=True)
        print(flush=True)
    llm.generate(prompts, params)
    started = time.perf_counter()
    if args.benchmark_profile:
        answers = profiled(llm, prompts, params)
    else:
        answers = llm.generate(prompts, params)
    elapsed_s = time.perf_counter() - started
    if not is_rank0():
        return
    num_tokens = sum(len(answer.tokens) for answer in answers)
    for number, answer in enumerate(answers if args.prompts else ()):
        print(f"{number}: {answer.prompt!r} -> {answer.text!r}")
    rate = num_tokens / elapsed_s
    print(
        f"{len(answers)} requests, {num_tokens} generated tokens, {elapsed_s:.3f} s: "
        f"{rate:.1f} tokens/s, {rate / len(answers):.1f} tokens/s per request"
    )


def random_prompts(llm: LLM, args: argparse.Namespace) -> list[Prompt]:
    """Return --inference-max-requests prompts of --num-input-tokens random ids."""
    source = random.Random(args.seed)
    vocabulary = range(llm.engine.model.vocab_size)
    count = args.inference_max_batch_size
    return [source.choices(vocabulary, k=args.num_input_tokens) for _ in range(count)]


def profiled(llm: LLM, prompts: list[Prompt], params: SamplingParams) -> list[Answer]:
    """Generate under Python's profiler, and print its table on rank 0."""

    with cProfile.Profile() as profile:
        answers = llm.generate(prompts, params)
    if is_rank0():
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return answers


if __name__ == "__main__":
    main()
