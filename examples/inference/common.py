"""What the scripts below share: their flags, a model with its checkpoint, a controller.

They use the names of Megatron Core.  All ranks run the same script and get the same answers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from typing import Any

from megatron.core.inference.inference_request import InferenceRequest
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
    InferenceWrapperConfig,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.training import get_args, get_model, print_rank_0
from megatron.training.checkpointing import load_checkpoint
from megatron.training.initialize import initialize_megatron


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of prompts and sampling; set those of training that are not needed."""
    # Load the weights alone (--finetune), in the precision of this run whatever was saved.
    only_weights = {"finetune": True, "no_load_optim": True, "load_main_params_from_ckpt": True}
    parser.set_defaults(skip_train=True, **only_weights)
    group = parser.add_argument_group("text generation")
    group.add_argument("--prompts", nargs="+", required=True, metavar="TEXT")
    group.add_argument("--encoder-prompts", nargs="+", metavar="TEXT", help="T5: texts to read.")
    group.add_argument("--num-tokens-to-generate", type=int, default=30)
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument("--top_k", type=int, default=1)
    group.add_argument("--top_p", type=float, default=0.0)
    group.add_argument("--return-log-probs", action="store_true")
    group.add_argument("--top-n-logprobs", type=int, default=0)
    group.add_argument("--max-batch-size", type=int, help="Most texts at the same time.")
    group.add_argument("--stream", action="store_true", help="Print the first text as it grows.")
    group.add_argument("--output-path", help="JSON file of the answers, written by rank 0.")
    return parser


def start(
    model_provider: Callable[..., Any], model_kind: str, add: Callable[..., Any] = add_flags
) -> Any:
    """Set up the run, and return this rank's part of the model with the weights of --load."""
    initialize_megatron(
        extra_args_provider=add,
        args_defaults={
            "model_kind": model_kind,
            "micro_batch_size": 1,
            "exit_on_missing_checkpoint": True,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        },
    )
    model = get_model(model_provider, wrap_with_ddp=False)
    load_checkpoint(model, None, None)
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


def sampling_params() -> SamplingParams:
    """Return the parameters that the flags ask for."""
    args = get_args()
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        return_log_probs=args.return_log_probs,
        top_n_logprobs=args.top_n_logprobs,
        num_tokens_to_generate=args.num_tokens_to_generate,
    )


def report(answers: Iterable[InferenceRequest]) -> None:
    """Print the answers on rank 0, and write them to --output-path."""
    rows = []
    for answer in answers:
        prompt = answer.encoder_prompt or answer.prompt
        tokens = answer.generated_tokens
        assert tokens is not None, "the request is finished"
        print_rank_0(f"{prompt!r} -> {answer.generated_text!r}")
        rows.append(
            {
                "prompt": prompt,
                "text": answer.generated_text,
                "tokens": tokens if isinstance(tokens, list) else tokens.tolist(),
                "log_probs": answer.generated_log_probs,
                "top_n_logprobs": answer.generated_top_n_logprobs,
                "seconds": answer.tpot,
            }
        )
    if get_args().output_path and get_args().rank == 0:
        with open(get_args().output_path, "w") as file:
            json.dump(rows, file, indent=1)
