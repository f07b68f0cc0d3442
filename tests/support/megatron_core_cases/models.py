"""Models of GPT, BERT and of a project: losses and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_layer import TransformerLayer

from .frame import (
    Values,
    case,
    config,
    fill,
    gpt,
    noise,
    scheduled,
    start,
    tokens,
    trained,
    with_gradients,
)


@case()
def gpt_of_local_layers() -> Values:
    start()
    ids, places, mask = tokens()
    return trained(gpt(config()), ids, places, mask, labels=ids.roll(-1, 1))


@case()
def gpt_with_rope_groups_and_swiglu() -> Values:
    start()
    ids, places, mask = tokens()
    settings = config(
        num_query_groups=2,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    model = gpt(settings, spec, position_embedding_type="rope", rotary_percent=0.5)
    return trained(model, ids, places, mask, labels=ids.roll(-1, 1))


@case()
def experts_one_by_one() -> Values:
    start()
    ids, places, mask = tokens()
    settings = config(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.01,
        moe_router_load_balancing_type="aux_loss",
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
    )
    model = gpt(settings, get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False))
    return trained(model, ids, places, mask, labels=ids.roll(-1, 1))


@case(2)
def gpt_over_two_tensor_parallel_ranks() -> Values:
    start(tensor_model_parallel_size=2)
    ids, places, mask = tokens()
    settings = config(tensor_model_parallel_size=2)
    return trained(gpt(settings), ids, places, mask, labels=ids.roll(-1, 1))


@case(2)
def gpt_over_two_stages() -> Values:
    start(pipeline_model_parallel_size=2)
    settings = config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    first = parallel_state.is_pipeline_first_stage()
    return scheduled([gpt(settings, pre_process=first, post_process=not first)], 3)


@case(2)
def two_chunks_a_stage_that_predict_two_tokens() -> Values:
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    start(**sizes)
    settings = config(
        **sizes,
        num_layers=4,
        mtp_num_layers=1,
        mtp_loss_scaling_factor=0.1,
        overlap_p2p_comm=True,  # with two stages NVIDIA's schedule needs it
        batch_p2p_comm=False,
        pipeline_dtype=torch.float32,
    )
    spec = get_gpt_layer_local_spec()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunks = [
        gpt(
            settings,
            spec,
            pre_process=stage == chunk == 0,
            post_process=stage == chunk == 1,
            position_embedding_type="rope",
            mtp_block_spec=get_gpt_mtp_block_spec(settings, spec, False, vp_stage=chunk),
            vp_stage=chunk,
        )
        for chunk in range(2)
    ]
    values, logged = scheduled(chunks, 4), {}
    MTPLossLoggingHelper.track_mtp_metrics(1 / 4, 0, None, None, logged)
    return values | logged


class OwnAttention(torch.nn.Module):
    """A project's: NVIDIA's without Transformer Engine takes no sizes of latent attention."""

    def __init__(self, *args: Any, softmax_scale: float, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **_: Any) -> Tensor:
        """Return the contexts [s, b, heads * size] of causal attention."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        causal = torch.nn.functional.scaled_dot_product_attention
        contexts = causal(q, k, v, is_causal=True, scale=self.scale)
        return contexts.permute(2, 0, 1, 3).flatten(2)


@case()
def latent_attention() -> Values:
    start()
    settings = config(
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
        rotary_scaling_factor=4.0,
        original_max_position_embeddings=8,
        mscale_all_dim=1.0,
        apply_rope_fusion=False,
        add_bias_linear=False,
    )
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True)
    spec.submodules.self_attention.submodules.core_attention = OwnAttention
    ids, places, mask = tokens()
    model = gpt(settings, spec, position_embedding_type="rope")
    return trained(model, ids, places, mask, labels=ids.roll(-1, 1))


@case(2)
def experts_over_two_ranks() -> Values:
    start(expert_model_parallel_size=2)
    ids, places, mask = tokens()
    settings = config(
        num_moe_experts=4,
        expert_model_parallel_size=2,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="none",
        moe_router_topk_scaling_factor=1.5,
        moe_token_dispatcher_type="alltoall",
        moe_shared_expert_intermediate_size=24,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )
    model = gpt(settings, get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False))
    return trained(model, ids, places, mask, labels=ids.roll(-1, 1))


@case()
def bert() -> Values:
    start()
    ids, _, _ = tokens()
    model = BertModel(
        config=config(),
        num_tokentypes=2,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=100,
        max_sequence_length=64,
        add_binary_head=True,
    )
    fill(model)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    loss, binary = model(ids, mask, torch.zeros_like(ids), lm_labels=ids.roll(1, 1))
    loss = loss[mask.bool()]  # losses of padding have no meaning
    (loss.mean() + binary.float().square().mean()).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, "binary": binary, **grads}


@case()
def layer_of_a_subclass() -> Values:
    class ScaledAttention(SelfAttention):
        """Multiplies queries by 2."""

        def get_query_key_value_tensors(
            self, hidden_states: Tensor, key_value_states: Any = None
        ) -> Any:
            query, key, value = super().get_query_key_value_tensors(hidden_states, key_value_states)
            return query * 2, key, value

    class NamedLayer(TransformerLayer):
        """Takes Megatron Core's arguments by position."""

        def __init__(
            self,
            config: Any,
            submodules: Any,
            layer_number: int = 1,
            hidden_dropout: Any = None,
            model_comm_pgs: Any = None,
            vp_stage: Any = None,
        ) -> None:
            super().__init__(
                config, submodules, layer_number, hidden_dropout, model_comm_pgs, vp_stage
            )

    start()
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.module = ScaledAttention
    layer = NamedLayer(config(), spec.submodules)
    fill(layer)
    mask = tokens()[2]
    return with_gradients(lambda x: layer(x, attention_mask=mask)[0], noise(16, 2, 32))


@case()
def a_language_module_of_a_project() -> Values:
    class Tiny(LanguageModule):
        """An embedding whose weights are the output layer too."""

        def __init__(self, settings: Any) -> None:
            super().__init__(config=settings)
            init = settings.init_method
            self.word = tensor_parallel.VocabParallelEmbedding(
                num_embeddings=100, embedding_dim=32, init_method=init, config=settings
            )
            self.out = tensor_parallel.ColumnParallelLinear(
                32, 100, config=settings, init_method=init, bias=False, skip_bias_add=False
            )

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            hidden = self.word(ids).transpose(0, 1).contiguous()
            logits, _ = self.out(hidden)
            return self.compute_language_model_loss(labels, logits)

    start()
    ids, _, _ = tokens()
    return trained(Tiny(config()), ids, ids.roll(-1, 1))
