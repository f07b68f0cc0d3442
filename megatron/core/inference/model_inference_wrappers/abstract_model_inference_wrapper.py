"""Base class of wrappers, which join a model with the sizes of generation.

Engines generate with `generation_model`: the paged engine computes positions, masks and caches by
itself.  The methods with which Megatron-LM's engines run a model remain for scripts that run it by
themselves, with a `StaticInferenceContext`.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.diagnostics.log_once import warn_once
from megatron.core.inference import communication_utils as stages
from megatron.core.inference.contexts.base_context import BaseInferenceContext
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
    InferenceWrapperConfig,
)
from megatron.core.inference.paged_engine.runner import GenerationModel
from megatron.core.inference.replicated_sequences import ReplicatedSequences
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, get_model_config

# Methods of Megatron-LM's engines; a subclass that has its own expects them to be called.
_STEPS = (
    "get_batch_for_context_window",
    "run_one_forward_step",
    "forward_pass_without_pipeline_parallel",
    "forward_pass_with_pipeline_parallel_small_input_batch",
    "forward_pass_with_pipeline_parallel_large_input_batch",
)


class AbstractModelInferenceWrapper(abc.ABC):
    """A model of this rank's stage, its sizes and a context for forward passes of scripts.

    ``model_comm_pgs`` defaults to the groups that the model was built with.
    """

    reads_prompt_in_encoder = False
    _end_roles: tuple[str, ...] = ("eod", "eos_id", "eos")

    def __init__(
        self,
        model: nn.Module,
        inference_wrapper_config: InferenceWrapperConfig,
        inference_context: BaseInferenceContext | None = None,
        model_comm_pgs: ProcessGroupCollection | None = None,
    ) -> None:
        assert not isinstance(model, Iterable), "generation has no virtual pipeline stages"
        self.model = model
        self.inference_wrapper_config = inference_wrapper_config
        if inference_context is None:
            inference_context = StaticInferenceContext.from_config(inference_wrapper_config)
        self.inference_context = inference_context
        groups = get_attr_wrapped_model(model, "pg_collection")
        self.model_comm_pgs: ProcessGroupCollection = model_comm_pgs or groups
        self.tp_group, self.pp_group = self.model_comm_pgs.tp, self.model_comm_pgs.pp
        self.model_is_pipeline_parallel = self.pp_group.size() > 1
        self.sequences = ReplicatedSequences(model)
        for name in ("nccl_all_reduce_for_prefill", "fp8"):
            if vars(inference_wrapper_config).get(name):
                warn_once(f"InferenceWrapperConfig: {name} has no effect: the model decides")

    @property
    def inference_params(self) -> BaseInferenceContext:
        """The context, under its former name."""
        return self.inference_context

    @inference_params.setter
    def inference_params(self, value: BaseInferenceContext) -> None:
        self.inference_context = value

    def generation_model(self, tokenizer: Any, eod: int | None = None) -> GenerationModel:
        """Return the model for an engine; ``eod`` ends a text, by default as the tokenizer says.

        Raises ConfigError for a model that the engine cannot run.
        """
        config: TransformerConfig = get_model_config(self.model)
        base = AbstractModelInferenceWrapper
        for kind in type(self).__mro__:
            own = [n for n in _STEPS if n in vars(kind)]
            if own and not kind.__module__.startswith(base.__module__.rpartition(".")[0]):
                raise ConfigError(
                    f"{kind.__name__} defines {own[0]}, but engines compute the batches of a model "
                    "by themselves: derive the wrapper from GPTInferenceWrapper or "
                    "T5InferenceWrapper without it"
                )
        if config.moe_expert_capacity_factor is not None:
            warn_once(
                "moe_expert_capacity_factor drops tokens of experts, so that a text depends on the "
                "other requests of its steps: build the model without it"
            )
        module = self.text_model()
        vocab_size = min(int(tokenizer.vocab_size), get_attr_wrapped_model(module, "vocab_size"))
        return GenerationModel(
            module=module,
            config=config,
            groups=self.model_comm_pgs,
            device=next(self.model.parameters()).device,
            vocab_size=vocab_size,
            max_sequence_length=get_attr_wrapped_model(module, "max_sequence_length"),
            eod=token_of(tokenizer, *self._end_roles) if eod is None else eod,
            decoder_start=self.start_of_decoder(tokenizer),
        )

    def text_model(self) -> nn.Module:
        """Return the part of the model that generates: all of it."""
        return self.model

    def start_of_decoder(self, tokenizer: Any) -> int | None:
        """Return the token that a decoder starts with; None without an encoder."""
        return None

    # ---- forward passes of scripts -------------------------------------------------------------

    def prep_model_for_inference(self, prompts_tokens: Tensor | None = None) -> None:
        """Set evaluation mode and empty the context."""
        self.model.eval()
        if isinstance(self.inference_context, StaticInferenceContext):
            self.inference_context.reset()

    @abc.abstractmethod
    def prep_inference_input(self, prompt_tokens: Tensor) -> dict[str, Any]:
        """Return what `get_batch_for_context_window` reads, from tokens [b, s]."""

    @abc.abstractmethod
    def get_batch_for_context_window(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the input of one forward pass from an input, a first and a last position."""

    @torch.inference_mode()
    def run_one_forward_step(
        self, inference_input: dict[str, Any], recv_buffer_seq_len: int | None = None
    ) -> Tensor | None:
        """Run a batch through all stages; return logits [b, 1, v] of its last tokens.

        None on stages but the last.  Collective over tp and pp.
        """
        if self.model_is_pipeline_parallel:
            return self.forward_pass_with_pipeline_parallel_small_input_batch(
                inference_input, recv_buffer_seq_len
            )
        return self.forward_pass_without_pipeline_parallel(inference_input)

    def forward_pass_without_pipeline_parallel(self, inference_input: dict[str, Any]) -> Tensor:
        """Run a batch through a model of one stage; return logits of its last tokens."""
        logits = self._forward(inference_input)
        self.inference_context.increment_sequence_len_offset(self.num_positions(inference_input))
        return logits

    def forward_pass_with_pipeline_parallel_small_input_batch(
        self, inference_input: dict[str, Any], recv_buffer_seq_len: int | None = None
    ) -> Tensor | None:
        """Run a batch through the stages, one after the other; return logits on the last."""
        tokens: Tensor = inference_input["tokens"]
        config: TransformerConfig = get_model_config(self.model)
        dtype = torch.float32 if config.fp32_residual_connection else config.params_dtype
        if self.pp_group.rank() > 0:
            length = recv_buffer_seq_len or self.num_positions(inference_input)
            shape = (length, tokens.shape[0], config.hidden_size)
            received = torch.empty(shape, dtype=dtype, device=tokens.device)
            stages.recv_from_prev_pipeline_rank_(received, self.pp_group)
            get_attr_wrapped_model(self.model, "set_input_tensor")(received)
        out = self._forward(inference_input)
        self.inference_context.increment_sequence_len_offset(self.num_positions(inference_input))
        if stages.is_pipeline_last_stage(self.pp_group):
            return out
        stages.send_to_next_pipeline_rank(out.to(dtype), self.pp_group)
        return None

    def forward_pass_with_pipeline_parallel_large_input_batch(
        self, inference_input: dict[str, Any], recv_buffer_seq_len: int | None = None
    ) -> Tensor | None:
        """Run as `forward_pass_with_pipeline_parallel_small_input_batch`: without micro-batches."""
        return self.forward_pass_with_pipeline_parallel_small_input_batch(
            inference_input, recv_buffer_seq_len
        )

    def num_positions(self, inference_input: dict[str, Any]) -> int:
        """Return the positions of a row that the model adds to its context: its tokens."""
        return int(inference_input["tokens"].shape[1])

    def _forward(self, inference_input: dict[str, Any]) -> Tensor:
        with self.sequences.bound():
            out: Tensor = self.model(
                inference_input["tokens"],
                inference_input["position_ids"],
                inference_input["attention_mask"],
                inference_context=self.inference_context,
            )
        return out


def token_of(tokenizer: Any, *roles: str) -> int | None:
    """Return the id of the first of ``roles`` that a tokenizer has; None if it has none."""
    for role in roles:
        found = getattr(tokenizer, role, None)
        if found is not None:
            return int(found)
    return None
