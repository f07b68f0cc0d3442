"""Programs that use megatron.core as a library; the same code runs on NVIDIA's release.

``python -m tests.support.megatron_core_cases OUTPUT [CASE ...]`` writes the values that each case
returns on each rank.  `tools/dev/library_judge.py` runs it with both libraries, compares, and
records NVIDIA's values for `test_megatron_core_cases.py`.  Without a GPU, `cuda_on_cpu` replaces
the calls of torch.cuda that NVIDIA's library makes unconditionally.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

Values = dict[str, Any]
CASES: dict[str, tuple[int, Callable[[], Values]]] = {}  # name -> ranks, function


def case(ranks: int = 1) -> Callable[[Callable[[], Values]], Callable[[], Values]]:
    """Register a case, which runs on each of ``ranks`` processes."""

    def register(function: Callable[[], Values]) -> Callable[[], Values]:
        CASES[function.__name__] = ranks, function
        return function

    return register


# -- what several cases share ---------------------------------------------------------------------


def config(**more: Any) -> Any:
    """Return a small configuration."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    off = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
    return TransformerConfig(**{**sizes, **off, **more})


def start(**sizes: int) -> None:
    """Create the groups and the random number streams."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(123)


def fill(module: torch.nn.Module, seed: int = 1) -> None:
    """Set each parameter to values that depend on its name and shape alone."""
    with torch.no_grad():
        for name, param in module.named_parameters():
            own = random.Random(f"{seed} {name} {tuple(param.shape)}").getrandbits(40)
            noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(own)) * 0.05
            param.copy_(noise + (1 if "norm" in name and name.endswith("weight") else 0))


def tokens(length: int = 16, rows: int = 2, vocab: int = 100) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [b, s], positions [b, s] and a causal mask [1, 1, s, s]."""
    values = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(5))
    places = torch.arange(length)[None].expand(rows, -1)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    return values, places, mask


def noise(*shape: int, seed: int = 7) -> Tensor:
    """Return values that require a gradient."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_()


def with_gradients(function: Callable[..., Any], *inputs: Any) -> Values:
    """Return the output of ``function`` and the gradients of its inputs."""
    output = function(*inputs)
    first = output[0] if isinstance(output, tuple) else output
    weights = torch.linspace(-1, 1, first.numel()).view(first.shape)
    (first.float() * weights).sum().backward()
    grads = {f"gradient {i}": x.grad for i, x in enumerate(inputs) if torch.is_tensor(x)}
    return {"output": output, **{name: grad for name, grad in grads.items() if grad is not None}}


def trained(model: torch.nn.Module, *inputs: Any, **kwargs: Any) -> Values:
    """Fill the model, run it and return its losses and the gradients by name."""
    fill(model)
    loss = model(*inputs, **kwargs)
    loss.mean().backward()
    return {"loss": loss, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def gpt(settings: Any, spec: Any = None, **more: Any) -> Any:
    """Build a GPT of the local layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = spec or get_gpt_layer_local_spec()
    return GPTModel(settings, spec, vocab_size=100, max_sequence_length=64, **more)


# -- cases ----------------------------------------------------------------------------------------


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
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

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
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # NVIDIA's router reads it without the package
        moe_utils.te_general_gemm = None
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
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    start(pipeline_model_parallel_size=2)
    settings = config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    first = parallel_state.is_pipeline_first_stage()
    model = gpt(settings, pre_process=first, post_process=not first)
    fill(model)
    ids, places, mask = tokens()

    def forward_step(data: Any, part: Any) -> Any:
        output = part(ids, places, mask, labels=ids.roll(-1, 1))
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    reported = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(range(3)),
        model=[model],
        num_microbatches=3,
        seq_length=16,
        micro_batch_size=2,
        forward_only=False,
    )
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"reported": [r["loss"] for r in reported], **grads}


@case(2)
def optimizer_over_two_replicas() -> Values:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    values = {}
    start()
    for sharded in (False, True):
        settings = config()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
        model = gpt(settings)
        fill(model)
        wrapped = DistributedDataParallel(settings, ddp, model)
        wrapped.broadcast_params()
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                min_lr=1e-3,
                weight_decay=0.1,
                adam_eps=1e-3,  # values of no gradient are noise, which Adam would amplify
                clip_grad=1.0,
                use_distributed_optimizer=sharded,
            ),
            [wrapped],
        )
        scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=2,
            lr_decay_steps=10,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.2,
            wd_incr_steps=10,
            wd_incr_style="linear",
            use_checkpoint_opt_param_scheduler=False,
        )
        ids, places, mask = tokens(rows=2 + dist.get_rank())
        for step in range(3):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            wrapped(ids, places, mask, labels=ids.roll(-1, 1)).mean().backward()
            finalize_model_grads([wrapped])
            done, norm, zeros = optimizer.step()
            scheduler.step(increment=1)
            values[f"{sharded} {step}"] = [done, norm, zeros, optimizer.param_groups[0]["lr"]]
        values |= {f"{sharded} {n}": p.detach() for n, p in model.named_parameters()}
    return values


@case(2)
def a_checkpoint_of_two_tensor_parallel_ranks() -> Values:
    from megatron.core import dist_checkpointing

    start(tensor_model_parallel_size=2)
    settings = config(tensor_model_parallel_size=2)
    model, other = gpt(settings), gpt(settings)
    fill(model)
    box = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box)
    state = model.sharded_state_dict()
    dist_checkpointing.save({"model": state, "step": 3}, box[0])
    wanted = {"model": other.sharded_state_dict(), "step": None}
    loaded = dist_checkpointing.load(wanted, box[0])
    other.load_state_dict(loaded["model"])
    shapes = {
        key: [entry.key, entry.global_shape, entry.local_shape, entry.global_offset]
        for key, entry in state.items()
        if hasattr(entry, "global_shape") and not key.endswith("_extra_state")
    }
    return {"step": loaded["step"], **shapes, **dict(other.named_parameters())}


@case()
def rank_numbers_of_groups() -> Values:
    from megatron.core.parallel_state import RankGenerator

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
    from megatron.core.transformer.moe import moe_utils

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
    from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    start()
    values: Values = {}
    functions = {"geglu": bias_geglu_impl, "gelu": bias_gelu_impl, "swiglu": bias_swiglu_impl}
    for name, function in functions.items():
        for text, result in with_gradients(function, noise(3, 2, 8), noise(8, seed=3)).items():
            values[f"{name} {text}"] = result
    return values


@case()
def rotary_embeddings() -> Values:
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

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
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import mappings

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


@case(2)
def experts_over_two_ranks() -> Values:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # NVIDIA's router reads it without the package
        moe_utils.te_general_gemm = None
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
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

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
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.transformer_layer import TransformerLayer

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
    from megatron.core import tensor_parallel
    from megatron.core.models.common.language_module.language_module import LanguageModule

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


@case()
def parallel_linear_layers() -> Values:
    from megatron.core import tensor_parallel

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


@case()
def learning_rates() -> Values:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    values: Values = {}
    for style in ("constant", "linear", "cosine", "inverse-square-root", "WSD"):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        more = {"wsd_decay_steps": 5, "lr_wsd_decay_style": "linear"} if style == "WSD" else {}
        scheduler = OptimizerParamScheduler(
            optimizer, 0.0, 1.0, 0.1, 3, 20, style, 0.1, 0.3, 10, "cosine", False, False, **more
        )
        rates = []
        for _ in range(22):
            scheduler.step(1)
            group = optimizer.param_groups[0]
            rates.append([group["lr"], group["weight_decay"]])
        values[style] = rates
        values[f"{style} state"] = dict(scheduler.state_dict())
    return values


@case(4)
def grid_of_communicators() -> Values:
    from megatron.core.hyper_comm_grid import HyperCommGrid

    grid = HyperCommGrid([2, 1, 2], ["tp", "cp", "dp"])
    values = {}
    for axes in (["tp"], ["dp"], ["tp", "dp"]):
        group = grid.create_pg(axes)
        values[str(axes)] = [dist.get_process_group_ranks(group), grid._gen_rank_enum(axes)]
        values[f"{axes} again"] = grid.get_pg(axes) is group
    return values


@case(2)
def sharded_tensors_by_hand() -> Values:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensorFactory,
    )
    from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    start(tensor_model_parallel_size=2)
    rank = dist.get_rank()
    box = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(box)

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any) -> Any:
        offsets = (0, rank, 2)
        halves = data.chunk(2)
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{n}", half, offsets, replica_id=replica_id)
            for n, half in zip("ab", halves, strict=True)
        ]

    def state(scale: float) -> Any:
        own = torch.arange(8.0).view(4, 2) * scale + rank
        parts = make_sharded_tensors_for_checkpoint(
            {"weight": own, "bias": torch.ones(3) * scale}, "old.", {"weight": 0}
        )
        replace_prefix_for_sharding(parts, "old.", "new.")
        return {
            **parts,
            "stacked": ShardedTensor.from_rank_offsets(
                "stacked", torch.ones(3) * (rank + scale), (0, rank, 2), prepend_axis_num=1
            ),
            "object": ShardedObject("object", {"value": scale + rank}, (2,), (rank,)),
            "factory": ShardedTensorFactory("factory", own, build, torch.cat),
            "local": LocalNonpersistentObject("kept"),
            "plain": scale,
        }

    saved = state(1.0)
    values = {
        key: [e.key, e.global_shape, e.local_shape, e.global_offset, e.axis_fragmentations]
        for key, e in saved.items()
        if isinstance(e, ShardedTensor)
    }
    dist_checkpointing.save(saved, box[0])
    loaded = dist_checkpointing.load(state(0.0), box[0])
    for key, value in loaded.items():
        values[f"loaded {key}"] = value
    return values


@case()
def strictness_of_loads() -> Values:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.validation import StrictHandling

    start()
    folder = tempfile.mkdtemp()
    make = ShardedTensor.from_rank_offsets
    dist_checkpointing.save({"a": make("a", torch.ones(2)), "b": make("b", torch.ones(2))}, folder)
    values: Values = {}
    for mode in StrictHandling:
        wanted = {"a": make("a", torch.zeros(2)), "c": make("c", torch.zeros(2))}
        if mode.name == "ASSUME_OK_UNEXPECTED":
            continue  # fails inside the format's reader
        try:
            found = dist_checkpointing.load(wanted, folder, strict=mode)
            missing = [sorted(keys) for keys in found[1:]] if isinstance(found, tuple) else None
            values[mode.name] = [sorted(found[0] if missing is not None else found), missing]
        except CheckpointingException:
            values[mode.name] = "refused"
    values["metadata"] = sorted(dist_checkpointing.load_tensors_metadata(folder))
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


def run_cases(rank: int, world_size: int, names: Collection[str] = ()) -> Values:
    """Run the cases of this number of ranks one after the other, in one process per rank."""
    from megatron.core import parallel_state

    values = {}
    for name, (ranks, function) in CASES.items():
        if ranks == world_size and name in (names or CASES):
            parallel_state.destroy_model_parallel()
            try:
                values[f"{name}.{rank}"] = function()
            except Exception:
                values[f"{name}.{rank}"] = {"error": traceback.format_exc()}
    return values


def _run(rank: int, world_size: int, names: list[str], folder: str, emulates: bool) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if emulates:
        import cuda_on_cpu  # beside this file, which NVIDIA's library runs as a program

        cuda_on_cpu.emulate_cuda()
    store = dist.FileStore(f"{folder}/{world_size}.store", world_size)
    limit = timedelta(seconds=60)  # a rank that fails leaves the others in a collective
    dist.init_process_group("gloo", None, limit, world_size, rank, store)
    torch.save(run_cases(rank, world_size, names), f"{folder}/{world_size}.{rank}.pt")
    dist.barrier()
    os._exit(0)


def main(folder: str, names: list[str]) -> None:
    """Run the cases; each rank writes a file with the values of all cases."""
    for ranks in sorted({CASES[name][0] for name in names or CASES}):
        arguments = ranks, names, folder, not torch.cuda.is_available()
        mp.spawn(_run, arguments, nprocs=ranks)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
