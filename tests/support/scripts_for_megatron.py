"""Scripts in the style of those written for Megatron Core; each rank runs the same one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.config.errors import ConfigError
from megatron.core.inference.contexts import DynamicInferenceContext, StaticInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine, StaticInferenceEngine
from megatron.core.inference.inference_request import InferenceRequest
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
    InferenceWrapperConfig,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from tests.support.one_process import one_process_groups, tiny_config

VOCABULARY = 64
LENGTH = 64
PROMPTS = ["hello", "wo", "paged attention over many pages", "a", "tensor"]


class Letters:
    """A tokenizer of the letters a to z, with the attributes that controllers use."""

    vocab_size = VOCABULARY
    eod = 1
    bos = 2
    pad = 0

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) % 56 + 8 for letter in text]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(chr(token + 56) for token in ids)


def model_of(world: int, sizes: dict[str, int], **changes: Any) -> GPTModel:
    """Return this rank's stage of a model with the same weights in every layout."""
    groups: ProcessGroupCollection | None = one_process_groups()
    if world > 1:
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(
                sizes.get("tp", 1),
                sizes.get("pp", 1),
                expert_model_parallel_size=sizes.get("ep", 1),
                expert_tensor_parallel_size=sizes.get("etp"),
            )
        groups = None
    torch.manual_seed(7)
    config = tiny_config(
        num_layers=6,
        init_method_std=0.3,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=sizes.get("etp"),
        **changes,
    )
    is_one = world == 1
    return GPTModel(
        config,
        get_gpt_layer_local_spec(config.num_moe_experts, config=config),
        VOCABULARY,
        LENGTH,
        pre_process=is_one or parallel_state.is_pipeline_first_stage(),
        post_process=is_one or parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        pg_collection=groups,
    )


def controller_of(model: GPTModel, **sizes: Any) -> TextGenerationController:
    config = InferenceWrapperConfig(
        hidden_size=32,
        params_dtype=torch.float64,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=VOCABULARY,
        **{"inference_max_requests": 4, "inference_max_seq_length": LENGTH, **sizes},
    )
    wrapped = GPTInferenceWrapper(model, config, StaticInferenceContext.from_config(config))
    return TextGenerationController(wrapped, Letters())


def context_of(**sizes: Any) -> DynamicInferenceContext:
    found = {
        "params_dtype": torch.float64,
        "num_layers": 6,
        "kv_channels": 8,
        "num_attention_heads": 4,
        "max_sequence_length": LENGTH,
        "buffer_size_gb": 0.01,
        "buffer_guaranteed_fraction": 0.1,
        "chunk_size_tokens": 8,
    }
    return DynamicInferenceContext(**{**found, **sizes})


def facts_of(request: InferenceRequest) -> dict[str, Any]:
    """Return the fields of an answer as plain values, without times."""
    out = {}
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        out[field.name] = value.tolist() if isinstance(value, Tensor) else value
    for name in ("arrival_time", "sampling_params", "inference_parameters"):
        del out[name]
    out["tpot"] = len(request.tpot or [])
    return out


def static_script(
    rank: int, world: int, sizes: dict[str, int], twice: bool, changes: dict[str, Any] | None = None
) -> list[Any]:
    """Generate twice with one engine: greedy with everything that can be asked, then sampled."""
    model = model_of(world, sizes, **changes or {})
    engine = StaticInferenceEngine(controller_of(model), max_batch_size=3, random_seed=11)
    every = SamplingParams(
        top_k=1,
        num_tokens_to_generate=9,
        return_log_probs=True,
        return_segments=True,
        top_n_logprobs=2,
        return_prompt_top_n_logprobs=True,
    )
    out = engine.generate(prompts=PROMPTS, sampling_params=every)
    if twice:
        sampled = SamplingParams(temperature=0.8, top_p=0.9, num_tokens_to_generate=6)
        out += engine.generate(PROMPTS, False, None, sampled)
    return [facts_of(request) for request in out]


def dynamic_script(rank: int, world: int, sizes: dict[str, int]) -> list[Any]:
    """Add requests while others are generated."""
    engine = DynamicInferenceEngine(
        controller_of(model_of(world, sizes)), context_of(), None, False, random_seed=5
    )
    params = SamplingParams(top_k=1, return_log_probs=True)
    arrivals = list(enumerate(PROMPTS))
    finished = []
    num_steps = 0
    while arrivals or engine.has_unfinished_requests():
        if arrivals and num_steps % 2 == 0:
            number, prompt = arrivals.pop(0)
            engine.add_request(number, prompt, num_tokens_to_generate=9)
        finished += engine.step(params)[1]
        num_steps += 1
    assert not engine.context.has_unfinished_requests()
    return [facts_of(request) for request in sorted(finished, key=lambda r: r.request_id)]


def replicas_script(rank: int, world: int, sizes: dict[str, int]) -> list[str]:
    """Each of two replicas generates for prompts of its own, the second one more often."""
    engine = StaticInferenceEngine(controller_of(model_of(world, sizes)))
    replica = parallel_state.get_data_parallel_rank()
    params = SamplingParams(top_k=1, num_tokens_to_generate=5)
    texts = []
    for prompt in PROMPTS[replica : 2 * replica + 1]:
        (answer,) = engine.generate([prompt], sampling_params=params)
        texts.append(answer.generated_text)
    return texts


def trained_between_script(rank: int, world: int, sizes: dict[str, int]) -> list[Any]:
    """Generate with a model that shards sequences; return its answers and its losses around it."""
    model = model_of(world, sizes, sequence_parallel=True)
    engine = StaticInferenceEngine(controller_of(model))
    ids = torch.arange(8)[None] + 8
    losses = []
    params = SamplingParams(top_k=1, num_tokens_to_generate=5, return_log_probs=True)
    for _ in range(2):
        model.train()
        losses.append(float(model(ids, torch.arange(8)[None], None, labels=ids + 1).sum().detach()))
        out = engine.generate(PROMPTS, sampling_params=params)
    return [losses, [facts_of(request) for request in out]]


def own_loop_script(rank: int, world: int, sizes: dict[str, int]) -> list[int]:
    """Generate three greedy tokens after "hello" without an engine; return all tokens."""
    controller = controller_of(model_of(world, sizes, sequence_parallel=world > 1))
    wrapper = controller.inference_wrapped_model
    tokens = torch.tensor([Letters().tokenize("hello")])
    wrapper.prep_model_for_inference()
    for start, stop in ((0, 5), (5, 6), (6, 7)):
        inputs = wrapper.prep_inference_input(tokens)
        window = wrapper.get_batch_for_context_window(inputs, start, stop)
        logits = wrapper.run_one_forward_step(window)
        assert logits is not None
        greedy = SamplingParams(top_k=1)
        new = controller.sample_from_logits(logits[:, -1], greedy, Letters.vocab_size)
        tokens = torch.cat([tokens, new[:, None]], dim=1)
    assert isinstance(wrapper.inference_context, StaticInferenceContext)
    assert wrapper.inference_context.sequence_len_offset == 7
    return tokens[0].tolist()


def experts_in_training_script(rank: int, world: int) -> str:
    """Return the message of experts that are trained with tensor parallelism alone."""
    changes = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall"}
    model = model_of(world, {"tp": 2}, **changes)
    ids = torch.arange(8)[None] + 8
    with torch.no_grad():
        model(ids, torch.arange(8)[None], None)
    try:
        model(ids, torch.arange(8)[None], None)
    except ConfigError as error:
        return str(error)
    return "no error"
