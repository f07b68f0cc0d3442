"""What the generation scripts below share, in the structure of Megatron-LM's example scripts.

Flags, requests from flags or a file, and the answers as JSON; a user's code, which imports and
calls what Megatron-LM's `examples/inference/gpt` does and nothing of this project's own.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from megatron.core.inference.sampling_params import SamplingParams
from megatron.training import get_args
from megatron.training import get_model as build_model
from megatron.training.checkpointing import load_checkpoint
from pretrain_gpt import model_provider as gpt_provider
from pretrain_mamba import model_provider as mamba_provider


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group(title="User's inference")
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument("--top_k", type=int, default=1)
    group.add_argument("--top_p", type=float, default=0.0)
    group.add_argument("--return-log-probs", action="store_true", default=False)
    group.add_argument("--top-n-logprobs", type=int, default=0)
    group.add_argument("--prompts", metavar="N", type=str, nargs="+")
    group.add_argument("--prompt-file")
    group.add_argument("--num-tokens-to-generate", type=int, default=30)
    group.add_argument("--model-provider", choices=["mamba", "gpt"], default="gpt")
    group.add_argument("--output-path", type=str, default=None)
    group.add_argument("--inference-ckpt-non-strict", action="store_true")
    group.add_argument("--stream", action="store_true", default=False)
    return parser


def load_model() -> Any:
    """Build the model of --model-provider, and assign to the arguments as Megatron-LM does."""
    args = get_args()
    provider = {"gpt": gpt_provider, "mamba": mamba_provider}[args.model_provider]
    model = build_model(provider, wrap_with_ddp=False)
    args.exit_on_missing_checkpoint = True
    load_checkpoint(
        ddp_model=model,
        optimizer=None,
        opt_param_scheduler=None,
        strict=not args.inference_ckpt_non_strict,
    )
    (only,) = model
    only.eval()
    return only


def sampling_params() -> SamplingParams:
    args = get_args()
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        return_log_probs=args.return_log_probs,
        num_tokens_to_generate=args.num_tokens_to_generate,
        top_n_logprobs=args.top_n_logprobs,
    )


def prompts() -> list[str]:
    args = get_args()
    if args.prompt_file is None:
        return list(args.prompts)
    with open(args.prompt_file) as lines:
        return [json.loads(line)["text"] for line in lines]


def answer_of(request: Any, latency: float) -> dict[str, Any]:
    """Return the JSON object of one finished request."""
    args = get_args()
    tokens = request.generated_tokens
    found = {
        "input_prompt": request.prompt,
        "generated_text": request.generated_text,
        "generated_tokens": tokens if isinstance(tokens, list) else tokens.tolist(),
        "latency": latency,
        "tpot": request.tpot,
    }
    if args.top_n_logprobs > 0:
        found["generated_top_n_logprobs"] = request.generated_top_n_logprobs
    if args.return_log_probs:
        found["logprobs"] = request.prompt_log_probs + request.generated_log_probs
    return found


def write(answers: dict[int, dict[str, Any]]) -> None:
    args = get_args()
    if args.rank == 0 and args.output_path:
        with open(args.output_path, "w") as file:
            json.dump(answers, file)
