"""Functions and layers that projects call by themselves."""

from __future__ import annotations

import functools
import random

import torch
import torch.distributed as dist

from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.parallel_state import RankGenerator
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_utils

from .frame import Values, case, config, fill, noise, start, with_gradients


@case()
def rank_numbers_of_groups() -> Values:
    values = {}
    draw = random.Random(0)
    for _ in range(30):
        sizes = [draw.choice([1, 2, 3, 4]) for _ in range(4)]
        order = draw.choice(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
        tp, dp, pp, cp = sizes
        generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        for token in ("tp", "dp", "pp", "cp", "dp-cp", "tp-pp", "tp-cp", "tp-dp-cp"):
            values[f"{sizes} {order} {token}"] = generator.get_ranks(token)
    return values


@case()
def helpers_of_experts() -> Values:
    start()
    values: Values = {}
    logits = noise(12, 8)
    for kind in ("softmax", "sigmoid"):
        values[f"topk {kind}"] = moe_utils.topk_routing_with_score_function(
            logits.detach(), 2, score_function=kind
        )
    probs = torch.softmax(noise(12, 8), -1)
    counts = torch.arange(8)
    values["balance"] = moe_utils.switch_load_balancing_loss_func(probs, counts, 12, 2, 8, 0.1)
    values["z loss"] = moe_utils.z_loss_func(noise(12, 8), 0.1)
    values["sinkhorn"] = moe_utils.sinkhorn(noise(12, 8).detach())
    values["capacity"] = moe_utils.get_capacity(12, 8, 1.25, 1)
    routed = torch.zeros(12, 8, dtype=torch.bool)
    routed[torch.arange(12), torch.arange(12) % 8] = True
    rows = noise(12, 4)
    moved, moved_probs, order = moe_utils.permute(rows, routed, num_out_tokens=12)
    values["moved"] = [moved, order]
    values["back"] = moe_utils.unpermute(moved, order, rows.shape, routing_map=routed)
    return values


@case()
def fused_functions() -> Values:
    start()
    values: Values = {}
    functions = {"geglu": bias_geglu_impl, "gelu": bias_gelu_impl, "swiglu": bias_swiglu_impl}
    for name, function in functions.items():
        for text, result in with_gradients(function, noise(3, 2, 8), noise(8, seed=3)).items():
            values[f"{name} {text}"] = result
    return values


@case()
def rotary_embeddings() -> Values:
    start()
    values: Values = {}
    for interleaved in (False, True):
        rope = RotaryEmbedding(8, 0.5, rotary_interleaved=interleaved, use_cpu_initialization=True)
        freqs = rope(16)
        values[f"freqs {interleaved}"] = freqs
        settings = config(rotary_interleaved=interleaved, apply_rope_fusion=False)
        rotate = functools.partial(apply_rotary_pos_emb, freqs=freqs, config=settings)
        for text, result in with_gradients(rotate, noise(16, 2, 4, 8)).items():
            values[f"{interleaved} {text}"] = result
    return values


@case(2)
def tensor_parallel_functions() -> Values:
    start(tensor_model_parallel_size=2)
    values: Values = {}
    rank = dist.get_rank()
    for name in (
        "copy_to_tensor_model_parallel_region",
        "reduce_from_tensor_model_parallel_region",
        "scatter_to_tensor_model_parallel_region",
        "gather_from_tensor_model_parallel_region",
        "scatter_to_sequence_parallel_region",
        "gather_from_sequence_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
    ):
        result = with_gradients(getattr(mappings, name), noise(4, 2, 6, seed=rank))
        values |= {f"{name} {text}": value for text, value in result.items()}
    logits = noise(4, 2, 10, seed=rank)
    target = torch.arange(8).view(4, 2) * 2
    loss = with_gradients(lambda x: tensor_parallel.vocab_parallel_cross_entropy(x, target), logits)
    return values | {f"loss {text}": value for text, value in loss.items()}


@case()
def parallel_linear_layers() -> Values:
    start()
    settings = config()
    init = settings.init_method
    values: Values = {}
    column = tensor_parallel.ColumnParallelLinear(
        32, 48, config=settings, init_method=init, bias=True, gather_output=True, skip_bias_add=True
    )
    row = tensor_parallel.RowParallelLinear(
        48,
        32,
        config=settings,
        init_method=init,
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
    )
    for layer in (column, row):
        fill(layer)
        for name, param in layer.named_parameters():
            marks = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")
            values[f"{type(layer).__name__} {name}"] = [getattr(param, m, None) for m in marks]
    values |= with_gradients(lambda x: row(column(x)[0])[0], noise(4, 2, 32))
    values["given weight"] = column(noise(4, 2, 32), weight=torch.ones(48, 32))[0]
    return values


@case(4)
def grid_of_communicators() -> Values:
    grid = HyperCommGrid([2, 1, 2], ["tp", "cp", "dp"])
    values = {}
    for axes in (["tp"], ["dp"], ["tp", "dp"]):
        group = grid.create_pg(axes)
        values[str(axes)] = [dist.get_process_group_ranks(group), grid._gen_rank_enum(axes)]
        values[f"{axes} again"] = grid.get_pg(axes) is group
    return values


@case()
def errors() -> Values:
    values: Values = {}
    for name, settings in {
        "both": {"fp16": True, "bf16": True},
        "heads": {"num_attention_heads": 4, "tensor_model_parallel_size": 3},
        "experts": {"expert_model_parallel_size": 2},
        "groups": {"num_query_groups": 3, "tensor_model_parallel_size": 2},
    }.items():
        try:
            config(**settings)
            values[name] = "accepted"
        except (ValueError, AssertionError) as error:
            values[name] = "ValueError" if isinstance(error, ValueError) else "AssertionError"
    return values
