"""Wrappers, which join a model with the sizes of generation.

Engines generate with `generation_model`: the paged engine computes positions, masks and caches by
itself.  The methods with which Megatron-LM's engines run a model remain for scripts that run it by
themselves, with a `StaticInferenceContext`.

``b`` rows of ``s`` tokens, of which some stand for an image; ``t`` tiles of all images; ``v``
vocabulary.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.diagnostics.log_once import warn_once
from megatron.core.inference import communication_utils as stages
from megatron.core.inference.paged_engine.runner import GenerationModel, token_of
from megatron.core.inference.v014.collective_engine import changed, replicated_sequences
from megatron.core.inference.v014.contexts import (
    BaseInferenceContext,
    InferenceWrapperConfig,
    StaticInferenceContext,
)
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.multimodal.splicing import splice
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
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
_SENTINEL = re.compile(r"<extra_id_(\d+)>")


class AbstractModelInferenceWrapper(abc.ABC):
    """A model of this rank's stage, its sizes and a context for forward passes of scripts.

    ``model_comm_pgs`` defaults to the groups that the model was built with.
    """

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
        self.tp_group = self.model_comm_pgs.tp
        self.pp_group = self.model_comm_pgs.pp
        self.model_is_pipeline_parallel = self.pp_group.size() > 1
        self._changes = replicated_sequences(model)
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
        for name in _STEPS:
            owner = next(kind for kind in type(self).__mro__ if name in vars(kind))
            if owner.__module__ != __name__:
                raise ConfigError(
                    f"{owner.__name__} defines {name}, but engines compute the batches of a model "
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
            eod=self.eod_of(tokenizer) if eod is None else eod,
        )

    def eod_of(self, tokenizer: Any) -> int | None:
        """Return the token that ends a text."""
        return token_of(tokenizer, *self._end_roles)

    def text_model(self) -> nn.Module:
        """Return the part of the model that generates: all of it."""
        return self.model

    # ---- forward passes of scripts -------------------------------------------------------------

    def prep_model_for_inference(self, prompts_tokens: Tensor | None = None) -> None:
        """Set evaluation mode and empty the context."""
        self.model.eval()
        if isinstance(self.inference_context, StaticInferenceContext):
            self.inference_context.reset()

    @abc.abstractmethod
    def prep_inference_input(self, prompt_tokens: Tensor) -> dict[str, Any]:
        """Return the input of `get_batch_for_context_window`, from tokens [b, s]."""

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
        with changed(self._changes):
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
            shape = (length, tokens.shape[0], config.residual_width)
            received = torch.empty(shape, dtype=dtype, device=tokens.device)
            stages.recv_from_prev_pipeline_rank_(received, self.pp_group)
            get_attr_wrapped_model(self.model, "set_input_tensor")(received)
        out = self.forward_pass_without_pipeline_parallel(inference_input)
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
        out: Tensor = self.model(
            inference_input["tokens"],
            inference_input["position_ids"],
            inference_input["attention_mask"],
            inference_context=self.inference_context,
        )
        return out


class GPTInferenceWrapper(AbstractModelInferenceWrapper):
    """A GPTModel or MambaModel, which generates text."""

    def prep_inference_input(self, prompts_tokens: Tensor) -> dict[str, Any]:
        """Return tokens [b, s] and their positions; no mask: the decoder is causal."""
        positions = torch.arange(prompts_tokens.shape[1], device=prompts_tokens.device)
        return {
            "tokens": prompts_tokens,
            "attention_mask": None,
            "position_ids": positions.expand_as(prompts_tokens),
        }

    def get_batch_for_context_window(
        self,
        inference_input: dict[str, Any],
        context_start_position: int,
        context_end_position: int,
    ) -> dict[str, Any]:
        """Return the tokens of positions start to end - 1."""
        window = slice(context_start_position, context_end_position)
        windows = {name: inference_input[name][:, window] for name in ("tokens", "position_ids")}
        return inference_input | windows


class T5InferenceWrapper(AbstractModelInferenceWrapper):
    """A T5Model: its encoder reads a prompt of its own, its decoder generates."""

    _end_roles = ("eos", "eos_id", "eod")

    def __init__(
        self,
        model: nn.Module,
        inference_wrapper_config: InferenceWrapperConfig,
        inference_context: BaseInferenceContext | None = None,
        use_local: bool = False,
    ) -> None:
        """``use_local`` has no effect: it chooses a form of masks in Megatron-LM."""
        super().__init__(model, inference_wrapper_config, inference_context)

    def generation_model(self, tokenizer: Any, eod: int | None = None) -> GenerationModel:
        """Return the model for an engine, whose decoder begins as in training."""
        found = super().generation_model(tokenizer, eod)
        start = token_of(tokenizer, "bos", "bos_id", "pad", "pad_id") or 0  # the PAD of T5 is 0
        return replace(found, decoder_start=start)

    def tokenize_encoder_prompt(self, encoder_prompt: str, tokenizer: Any) -> list[int]:
        """Return the tokens of a text, in which ``<extra_id_N>`` is the N-th sentinel token."""
        special = getattr(tokenizer, "additional_special_tokens_ids", None) or []
        tokens: list[int] = []
        for i, part in enumerate(_SENTINEL.split(encoder_prompt)):
            if i % 2 == 0:
                tokens += tokenizer.tokenize(part) if part else []
            elif int(part) < len(special):
                tokens.append(special[int(part)])
            else:
                raise ConfigError(
                    f"<extra_id_{part}> in a prompt: the tokenizer has {len(special)} sentinels; "
                    "set --vocab-extra-ids as in training"
                )
        return tokens

    def pad_encoder_prompts_tokens(
        self, encoder_prompts_tokens_list: list[list[int]], max_sequence_length: int, tokenizer: Any
    ) -> list[list[int]]:
        """Return the prompts, each padded to ``max_sequence_length``."""
        pad = token_of(tokenizer, "pad", "pad_id") or 0
        every = encoder_prompts_tokens_list
        return [tokens + [pad] * (max_sequence_length - len(tokens)) for tokens in every]

    def prep_inference_input(
        self,
        prompts_tokens: Tensor,
        encoder_prompts: list[str] | None = None,
        tokenizer: Any = None,
    ) -> dict[str, Any]:
        """Return tokens of encoder [b, s] and decoder [b, t], and the encoder's padding mask."""
        found = [self.tokenize_encoder_prompt(p, tokenizer) for p in encoder_prompts or []]
        longest = max(map(len, found), default=0)
        rows = self.pad_encoder_prompts_tokens(found, longest, tokenizer)
        lengths = torch.tensor([len(tokens) for tokens in found], device=prompts_tokens.device)
        places = torch.arange(longest, device=prompts_tokens.device)
        return {
            "encoder_tokens": torch.tensor(rows, device=prompts_tokens.device),
            "decoder_tokens": prompts_tokens,
            "encoder_mask": places[None] >= lengths[:, None],
        }

    def get_batch_for_context_window(
        self,
        inference_input: dict[str, Any],
        context_start_position: int,
        context_end_position: int,
    ) -> dict[str, Any]:
        """Return the input with the decoder tokens of positions 0 to end - 1: nothing is cached."""
        tokens = inference_input["decoder_tokens"][:, :context_end_position]
        return {**inference_input, "decoder_tokens": tokens}

    def forward_pass_without_pipeline_parallel(self, inference_input: dict[str, Any]) -> Tensor:
        """Run encoder and decoder; return logits [b, t, v]."""
        mask = inference_input["encoder_mask"]
        with changed(self._changes):
            logits: Tensor = self.model(
                inference_input["encoder_tokens"],
                inference_input["decoder_tokens"],
                encoder_attn_mask=mask,
                encoder_decoder_attn_mask=mask,
                runtime_gather_output=True,
            )
        return logits

    def forward_pass_with_pipeline_parallel_small_input_batch(
        self, inference_input: dict[str, Any], recv_buffer_seq_len: int | None = None
    ) -> Tensor | None:
        """Raise ConfigError: encoder and decoder run on one stage."""
        raise ConfigError("T5 generates with --pipeline-model-parallel-size 1")


class VLMInferenceWrapper(GPTInferenceWrapper):
    """A LLaVAModel, which writes text about images."""

    @property
    def whole_model(self) -> LLaVAModel:
        """The model without its wrappers."""
        whole = get_attr_wrapped_model(self.model, "language_model", return_model_obj=True)
        assert isinstance(whole, LLaVAModel), f"{type(whole).__name__} does not read images"
        if whole.reads_image_sizes:
            raise ConfigError(
                "requests of this API have no sizes of images, which this model reads: generate "
                "with megatron.inference.LLM"
            )
        return whole

    def text_model(self) -> nn.Module:
        """Return the language model, to whose input the engine adds embeddings of images."""
        text = self.whole_model.language_model
        return Float16Module(text.config, text) if isinstance(self.model, Float16Module) else text

    def generation_model(self, tokenizer: Any, eod: int | None = None) -> GenerationModel:
        """Return the model for an engine, with the encoder of images on its first stage."""
        whole = self.whole_model
        encode = None if whole.vision_model is None else whole.rows_of_images
        found = super().generation_model(tokenizer, eod)
        return replace(found, encode_images=encode, reads_images=True)

    # ---- forward passes of scripts -------------------------------------------------------------

    def prep_inference_input(  # type: ignore[override]
        self,
        prompts_tokens: Tensor,
        num_img_embeddings_per_tile: int,
        images: Tensor | None,
        num_tiles: Tensor | None,
        decoder_seq_length: int | None,
    ) -> dict[str, Any]:
        """Return tokens [b, s], tiles [t, 3, H, W] and the number of tiles of each image.

        Raises ConfigError if the model has another number of embeddings of a tile.
        """
        per_tile = self.whole_model.embeddings_per_tile
        if images is not None and num_img_embeddings_per_tile != per_tile:
            raise ConfigError(
                f"num_img_embeddings_per_tile is {num_img_embeddings_per_tile}, and the model has "
                f"{per_tile} embeddings of a tile: give this number"
            )
        sizes = {"num_tiles": num_tiles, "decoder_seq_length": decoder_seq_length}
        return super().prep_inference_input(prompts_tokens) | sizes | {"images": images}

    def get_batch_for_context_window(
        self,
        inference_input: dict[str, Any],
        context_start_position: int,
        context_end_position: int,
    ) -> dict[str, Any]:
        """Return the tokens of positions start to end - 1, and the images that these stand for."""
        window = slice(context_start_position, context_end_position)
        found = super().get_batch_for_context_window(inference_input, window.start, window.stop)
        is_image = inference_input["tokens"] == self.whole_model.image_token_index
        tiles = is_image.long()  # of each token: 0 at text, by default 1 at an image
        if (num_tiles := inference_input["num_tiles"]) is not None:
            tiles[is_image] = num_tiles.to(tiles.device, torch.int64).flatten()
        images: Tensor | None = inference_input["images"]
        if images is not None:
            # Rows have all their tiles in one tensor; a window has the tiles of its tokens.
            inside = torch.zeros_like(tiles, dtype=torch.bool)
            inside[:, window] = True
            images = images[inside.flatten().repeat_interleave(tiles.flatten())]
        return found | {"images": images, "num_tiles": tiles[:, window]}

    def num_positions(self, inference_input: dict[str, Any]) -> int:
        """Return the positions of a row.  Raises ConfigError for rows of several lengths."""
        tiles: Tensor = inference_input["num_tiles"]
        per_row = torch.where(tiles > 0, tiles * self.whole_model.embeddings_per_tile, 1).sum(1)
        if bool((per_row != per_row[0]).any()):
            raise ConfigError(
                f"rows with {per_row.tolist()} positions grow together: give them images of as "
                "many tiles, or use StaticInferenceEngine"
            )
        return int(per_row[0])

    def _forward(self, inference_input: dict[str, Any]) -> Tensor:
        whole = self.whole_model
        tokens = inference_input["tokens"]
        combined: Tensor | None = None
        if whole.pre_process:
            is_image = tokens == whole.image_token_index
            ids = tokens.masked_fill(is_image, 0)
            embedding = whole.language_model.embedding
            text = embedding(ids, inference_input["position_ids"]).transpose(0, 1)
            if bool(is_image.any()):
                counts = inference_input["num_tiles"] * whole.embeddings_per_tile
                found = whole.image_embeddings(inference_input["images"])
                text = splice(is_image, counts).embeddings(text, found)
            combined = text.transpose(0, 1).contiguous()
        out: Tensor = self.text_model()(
            None, None, None, decoder_input=combined, inference_context=self.inference_context
        )
        return out
