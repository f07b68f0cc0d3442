"""MambaModel: a decoder-only language model with a Mamba or hybrid stack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class MambaModel(GPTModel):
    """Embedding, a Mamba or hybrid stack, output layer; called like a `GPTModel`."""

    @library_call(
        "config mamba_stack_spec vocab_size max_sequence_length pre_process hybrid_attention_ratio "
        "hybrid_mlp_ratio hybrid_override_pattern post_process fp16_lm_cross_entropy "
        "parallel_output share_embeddings_and_output_weights position_embedding_type "
        "rotary_percent rotary_base scatter_embedding_sequence_parallel "
        "seq_len_interpolation_factor model_comm_pgs",
        like=GPTModel.__init__,
    )
    def __init__(
        self,
        config: TransformerConfig,
        mamba_stack_spec: ModuleSpec,
        vocab_size: int,
        max_sequence_length: int,
        *,
        hybrid_attention_ratio: float = 0.0,
        hybrid_mlp_ratio: float = 0.0,
        hybrid_override_pattern: str | None = None,
        position_embedding_type: str = "none",
        pg_collection: ProcessGroupCollection,
        **of_gpt: Any,
    ) -> None:
        """See `layer_pattern` for the pattern, `GPTModel` for the other arguments.

        Positions are optional: attention layers work without them, as Mamba layers are ordered.
        """
        pattern = {
            "hybrid_attention_ratio": hybrid_attention_ratio,
            "hybrid_mlp_ratio": hybrid_mlp_ratio,
            "hybrid_override_pattern": hybrid_override_pattern,
        }
        super().__init__(
            config,
            replace(mamba_stack_spec, params={**mamba_stack_spec.params, **pattern}),
            vocab_size,
            max_sequence_length,
            position_embedding_type=position_embedding_type,
            pg_collection=pg_collection,
            **of_gpt,
        )

    def build_decoder(
        self, spec: ModuleSpec | TransformerBlockSubmodules, block: object = None
    ) -> TransformerBlock:
        assert isinstance(spec, ModuleSpec), "as given to the constructor"
        stack: TransformerBlock = build_module(
            spec,
            config=self.config,
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=self.pg_collection,
            vp_stage=self.vp_stage,
        )
        return stack

    def renamed_parameters(self) -> dict[str, str]:
        return {"decoder.final_layernorm.": "decoder.final_norm.", **super().renamed_parameters()}
