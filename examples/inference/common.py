"""What the scripts below share: their flags, a model with its checkpoint, a controller.

They use the names of Megatron Core.  All ranks run the same script and get the same answers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.inference.engines import StaticInferenceEngine
from megatron.core.inference.inference_request import InferenceRequest
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
    InferenceWrapperConfig,
)
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.engine_flags import engine_options
from megatron.training import get_args, get_model, print_rank_0
from megatron.training.checkpointing import load_checkpoint
from megatron.training.initialize import initialize_megatron


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of prompts and sampling, under Megatron-LM's names."""
    # Load the weights alone (--finetune), in the precision of this run whatever was saved.
    parser.set_defaults(finetune=True, no_load_optim=True, load_main_params_from_ckpt=True)
    # Without sizes on the command line, the model is that of the checkpoint.
    sizes = (
        "--num-layers",
        "--encoder-num-layers",
        "--hybrid-",
        "--spec",
        "--config",
        "--yaml-cfg",
    )
    parser.set_defaults(use_checkpoint_args=not any(w.startswith(sizes) for w in sys.argv))
    group = parser.add_argument_group("text generation")
    group.add_argument("--prompts", nargs="+", metavar="TEXT")
    group.add_argument(
        "--prompt-file", metavar="FILE", help='Lines {"text": ...} with the prompts.'
    )
    group.add_argument(
        "--prompt-file-num-truncate", type=int, metavar="N", help="Read the first N prompts only."
    )
    group.add_argument(
        "--random-sample-prompts",
        action="store_true",
        help="Take prompts of --prompt-file at random, at random times.",
    )
    group.add_argument(
        "--num-tokens-to-prompt",
        nargs=2,
        type=int,
        default=(64, 1024),
        metavar=("FEWEST", "MOST"),
        help="Words of the synthetic prompts that replace --prompts and --prompt-file.",
    )
    group.add_argument("--incoming-requests-per-sec", type=float, default=100.0)
    group.add_argument("--incoming-requests-duration", type=float, default=10.0, metavar="SECONDS")
    group.add_argument(
        "--incoming-requests-per-step",
        type=int,
        metavar="N",
        help="Add N requests before each step of the engine, whatever their times are.",
    )
    group.add_argument(
        "--inference-repeat-n",
        type=int,
        default=1,
        metavar="N",
        help="Generate N times, to measure the speed; the last answers are written.",
    )
    group.add_argument(
        "--model-provider",
        choices=("gpt", "mamba", "hybrid"),
        default="gpt",
        help="Kind of the model, if neither --use-checkpoint-args nor a flag of hybrids tells it.",
    )
    group.add_argument(
        "--inference-ckpt-non-strict",
        action="store_true",
        help="Only log tensors that the checkpoint lacks or has in addition.",
    )
    _add_answer_flags(group)
    return parser


def _add_answer_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--encoder-prompts", nargs="+", metavar="TEXT", help="T5: texts to read.")
    group.add_argument("--num-tokens-to-generate", type=int, default=30)
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument("--top_k", type=int, default=1)
    group.add_argument("--top_p", type=float, default=0.0)
    group.add_argument(
        "--termination-id",
        type=int,
        metavar="ID",
        help="Token that ends a text, in place of the tokenizer's; negative: none does.",
    )
    group.add_argument("--return-log-probs", action="store_true")
    group.add_argument("--top-n-logprobs", type=int, default=0)
    group.add_argument("--max-batch-size", type=int, help="Most texts at the same time.")
    group.add_argument("--stream", action="store_true", help="Print the first text as it grows.")
    group.add_argument("--output-path", help="JSON file of the answers, written by rank 0.")
    group.add_argument(
        "--output-every-n-results",
        type=int,
        default=1,
        metavar="N",
        help="Write every Nth answer only.",
    )
    group.add_argument(
        "--no-record-throughput",
        action="store_false",
        dest="record_throughput",
        default=False,
        help="Leave the generated tokens per second out of --output-path, where the scripts of "
        "examples/inference/advanced and offline_inference.py write them.",
    )


def start(
    model_provider: Callable[..., Any],
    model_kind: str | None = None,
    add: Callable[..., Any] = add_flags,
    *,
    records_throughput: bool = False,
) -> Any:
    """Set up the run, and return this rank's part of the model with the weights of --load.

    ``model_kind`` None: as the checkpoint or the flags say.  ``records_throughput``: the default
    of --no-record-throughput.
    """

    def add_all(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        add(parser).set_defaults(record_throughput=records_throughput)
        return parser

    initialize_megatron(
        extra_args_provider=add_all,
        args_defaults={
            "model_kind": model_kind,
            "micro_batch_size": 1,
            "exit_on_missing_checkpoint": True,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        },
    )
    model = get_model(model_provider, wrap_with_ddp=False)
    load_checkpoint(model, None, None, strict=not get_args().inference_ckpt_non_strict)
    return model[0].eval()


def wrapper_config() -> InferenceWrapperConfig:
    """Return the sizes that the flags ask for."""
    args = get_args()
    return InferenceWrapperConfig(
        hidden_size=args.hidden_size,
        params_dtype=args.params_dtype,
        inference_batch_times_seqlen_threshold=args.inference_batch_times_seqlen_threshold,
        padded_vocab_size=args.padded_vocab_size,
        inference_max_requests=args.inference_max_batch_size,
        inference_max_seq_length=args.inference_max_seq_length,
        fp32_residual_connection=args.fp32_residual_connection,
    )


def with_engine_flags(options: EngineOptions) -> EngineOptions:
    """Return ``options`` with the flags of the engine that Megatron Core's classes do not take."""
    asked = engine_options(get_args())
    names = "log_interval num_cuda_graphs state_dtypes has_prefix_cache".split()
    return replace(options, **{name: getattr(asked, name) for name in names})


def sampling_params(args: argparse.Namespace | None = None) -> SamplingParams:
    """Return the parameters that the flags ask for; ``args``: by default those of the run."""
    args = args or get_args()
    end = args.termination_id
    return SamplingParams(
        ignore_eos=end is not None,
        stop_token_ids=() if end is None or end < 0 else (end,),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        return_log_probs=args.return_log_probs,
        top_n_logprobs=args.top_n_logprobs,
        num_tokens_to_generate=args.num_tokens_to_generate,
    )


def prompts(args: argparse.Namespace | None = None) -> list[tuple[float, str]]:
    """Return the prompts that the flags ask for, with the second at which each arrives.

    Raises ConfigError for prompts from two places, or none.
    """
    args = args or get_args()
    if args.prompts and args.prompt_file:
        raise ConfigError(
            f"--prompts and --prompt-file {args.prompt_file} both give prompts: leave one out"
        )
    if args.prompts:
        return [(0.0, text) for text in args.prompts]
    chance = random.Random(args.seed)
    if args.prompt_file is None:
        fewest, most = args.num_tokens_to_prompt
        return [(at, "hi " * chance.randint(fewest, most)) for at in _arrivals(args, chance)]
    texts = _read_prompts(args.prompt_file)[: args.prompt_file_num_truncate]
    if args.random_sample_prompts:
        return [(at, chance.choice(texts)) for at in _arrivals(args, chance)]
    return [(0.0, text) for text in texts]


def _arrivals(args: argparse.Namespace, chance: random.Random) -> list[float]:
    """Return the seconds at which requests arrive, one at least."""
    rate = args.incoming_requests_per_sec
    last = args.incoming_requests_duration
    if not rate > 0:
        raise ConfigError(f"--incoming-requests-per-sec {rate}: give a number above 0")
    found = [chance.expovariate(rate)]
    while found[-1] < last:
        found.append(found[-1] + chance.expovariate(rate))
    found = found[:-1] or [0.0]
    return found if args.incoming_requests_per_step is None else [0.0] * len(found)


def _read_prompts(path: str) -> list[str]:
    try:
        texts = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'--prompt-file {path}: each line is an object {{"text": PROMPT}}; found {error!r}'
        ) from None
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"--prompt-file {path}: each line needs a text, and there is one at least"
        )
    return texts


def generate(engine: StaticInferenceEngine, **texts: Any) -> None:
    """Generate for all texts and report the answers, which end at the same time."""
    for _ in range(get_args().inference_repeat_n):
        started = time.perf_counter()
        answers = engine.generate(**texts, sampling_params=sampling_params())
        latency = time.perf_counter() - started
        report(answers, {answer.request_id: latency for answer in answers}, latency)


def report(
    answers: Iterable[InferenceRequest], latency: Mapping[int, float], elapsed_s: float
) -> None:
    """Print the answers on rank 0, and write them to --output-path.

    ``latency``: request id -> seconds.  ``elapsed_s``: of all answers together.
    """
    args = get_args()
    found: dict[int, dict[str, Any]] = {}
    for answer in answers:
        tokens = answer.generated_tokens
        assert tokens is not None, "the request is finished"
        prompt = answer.encoder_prompt or answer.prompt
        print_rank_0(f"{prompt!r} -> {answer.generated_text!r}")
        row = {
            "input_prompt": prompt,
            "generated_text": answer.generated_text,
            "generated_tokens": tokens if isinstance(tokens, list) else tokens.tolist(),
            "latency": latency[answer.request_id],
            "tpot": answer.tpot,
        }
        if args.return_log_probs:
            row["logprobs"] = [
                *(answer.prompt_log_probs or ()),
                *(answer.generated_log_probs or ()),
            ]
        if args.top_n_logprobs:
            row["generated_top_n_logprobs"] = answer.generated_top_n_logprobs
        found[answer.request_id] = row
    if args.rank == 0:
        write(args, found, elapsed_s)


def write(args: argparse.Namespace, rows: Mapping[int, dict[str, Any]], elapsed_s: float) -> None:
    """Print the speed, and write the answers to --output-path in Megatron-LM's form.

    That is a JSON object: request id -> answer, and in later versions ``throughput``, tokens/s.
    """
    rate = sum(len(row["generated_tokens"]) for row in rows.values()) / elapsed_s
    print(f"{len(rows)} requests in {elapsed_s:.3f} s: {rate:.1f} generated tokens/s", flush=True)
    written: dict[Any, Any] = dict(list(rows.items())[:: args.output_every_n_results])
    if args.record_throughput:
        written["throughput"] = [rate]
    if args.output_path:
        Path(args.output_path).write_text(json.dumps(written, indent=1))
