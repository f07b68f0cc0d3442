"""A user's script with the structure of Megatron-LM's `gpt_dynamic_inference.py`."""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.inference.contexts.dynamic_context import (
    ContextOverflowError,
    DynamicInferenceContext,
)
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
    InferenceWrapperConfig,
)
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.training import get_args, get_tokenizer
from megatron.training.initialize import initialize_megatron
from tests.support import user_inference as shared


def make_context(longest: int) -> DynamicInferenceContext:
    args = get_args()
    is_latent = args.multi_latent_attention
    return DynamicInferenceContext(
        params_dtype=args.params_dtype,
        num_layers=args.num_layers,
        kv_channels=args.kv_channels,
        num_attention_heads=(
            args.num_query_groups if args.group_query_attention else args.num_attention_heads
        ),
        max_sequence_length=longest,
        num_cuda_graphs=(
            args.inference_dynamic_batching_num_cuda_graphs if args.enable_cuda_graph else None
        ),
        buffer_size_gb=args.inference_dynamic_batching_buffer_size_gb,
        buffer_guaranteed_fraction=args.inference_dynamic_batching_buffer_guaranteed_fraction,
        chunk_size_tokens=args.inference_dynamic_batching_chunk_size,
        buffer_overflow_factor=args.inference_dynamic_batching_buffer_overflow_factor,
        max_requests_override=args.inference_dynamic_batching_max_requests_override,
        max_tokens_override=args.inference_dynamic_batching_max_tokens_override,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        materialize_only_last_token_logits=not args.return_log_probs,
        cache_mla_latent=is_latent and args.cache_mla_latents,
        kv_lora_rank=args.kv_lora_rank if is_latent else None,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
    )


def make_controller(
    model: torch.nn.Module, context: DynamicInferenceContext
) -> TextGenerationController:
    args = get_args()
    config = InferenceWrapperConfig(
        hidden_size=args.hidden_size,
        inference_batch_times_seqlen_threshold=args.inference_batch_times_seqlen_threshold,
        fp32_residual_connection=args.fp32_residual_connection,
        params_dtype=args.params_dtype,
        padded_vocab_size=args.padded_vocab_size,
        inference_max_requests=args.inference_max_batch_size,
        inference_max_seq_length=args.inference_max_seq_length,
        nccl_all_reduce_for_prefill=args.nccl_all_reduce_for_prefill,
    )
    wrapped = GPTInferenceWrapper(model, config, context)
    is_whole = parallel_state.is_pipeline_first_stage() and parallel_state.is_pipeline_last_stage()
    wrapped.model_is_pipeline_parallel = not is_whole
    return TextGenerationController(wrapped, get_tokenizer())


def describe(context: DynamicInferenceContext, model: torch.nn.Module) -> str:
    """Return one line about model and context, as Megatron-LM's script prints it."""
    args = get_args()
    size = sum(p.numel() for p in model.parameters())
    graphs = context.cuda_graph_token_counts if args.enable_cuda_graph else "--"
    return (
        f"{size} | graphs {graphs} | [r {context.max_requests}, t {context.max_tokens}] | "
        f"gtd [r {context.gtd_request_count}]"
    )


@torch.inference_mode()
def main() -> None:
    initialize_megatron(
        extra_args_provider=shared.add_flags,
        args_defaults={"no_load_rng": True, "no_load_optim": True},
    )
    args = get_args()
    tokenizer = get_tokenizer()
    params = shared.sampling_params()
    prompts = shared.prompts()
    model = shared.load_model()
    longest = max(len(tokenizer.tokenize(p)) for p in prompts) + params.num_tokens_to_generate
    context = make_context(longest)
    controller = make_controller(model, context)
    assert all(len(tokenizer.tokenize(prompt)) <= context.max_tokens for prompt in prompts)
    engine = DynamicInferenceEngine(
        controller,
        context,
        termination_id=tokenizer.eod,
        enable_cuda_graph=args.enable_cuda_graph,
        random_seed=args.seed,
    )
    if args.rank == 0:
        print(describe(context, model))
    answers: dict[int, dict[str, Any]] = {}
    started: dict[int, float] = {}
    kinds = []
    while True:
        while len(started) < len(prompts):
            number = len(started)
            try:
                engine.add_request(number, prompts[number], params.num_tokens_to_generate)
            except ContextOverflowError:
                break
            started[number] = time.perf_counter()
        kinds.append(engine.context.is_decode_only())
        _, finished, _ = engine.step(params, verbose=True)
        for request in finished:
            latency = time.perf_counter() - started[request.request_id]
            answers[request.request_id] = shared.answer_of(request, latency)
        if not engine.has_unfinished_requests() and len(started) == len(prompts):
            break
    assert kinds[0] is False, "the first step reads a prompt"
    assert params.num_tokens_to_generate < 2 or kinds[-1] is True, "the last one does not"
    shared.write(answers)


if __name__ == "__main__":
    main()
