"""Prune a checkpoint of GPT to smaller sizes, by the importance of its parts (Minitron).

`measure` scores the parts on calibration samples, `plan_pruning` selects the kept parts, `prune`
slices the tensors of a checkpoint of any format and layout, one at a time, and writes a checkpoint
with the arguments of the smaller model.

``n`` heads in ``g`` groups of queries, ``d`` head width, ``f`` neurons of an MLP, ``E`` experts.

Order of collectives: the forward passes, then `Importance.gather`; then rank 0 writes the
checkpoint, and an error is raised on all ranks.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.config.errors import CheckpointError, ConfigError, DataError
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.parallel.collectives import all_or_none, broadcast_json
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.text_files import read_text
from megatron.core.utils import get_attr_wrapped_model
from megatron.post_training.pruning.importance import (
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    LAYER,
    Importance,
    Scores,
    key,
)
from megatron.training.config.run import RunConfig
from megatron.training.conversion.convert import (
    ConversionRequest,
    read_source,
    run_config,
    write_checkpoint,
)
from megatron.training.data.batch import next_batch
from megatron.training.data.datasets import build_datasets
from megatron.training.data.loaders import chunk_iterators, make_loader
from megatron.training.initialize import create_context, install_groups
from megatron.training.models.registry import implementation_of
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.context import RunContext
from megatron.training.runtime.setup import build_model_chunks, build_stage
from megatron.training.step.run import ModelRun
from megatron.training.step.train_step import forward_backward

_MTP = "mtp."
_OF_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OF_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_SIZES = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups num_moe_experts"
).split()


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Sizes of the pruned model; None keeps a size."""

    num_layers: int | None = None
    layers_to_drop: tuple[int, ...] = ()  # numbers from 1, in place of num_layers
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    num_moe_experts: int | None = None


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Indices that one layer keeps, in ascending order; None keeps all."""

    groups: Tensor | None = None
    heads: Tensor | None = None
    neurons: Tensor | None = None
    experts: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PruningPlan:
    """Parts and arguments of the pruned model."""

    hidden: Tensor | None
    layers: Mapping[int, LayerPlan]  # old index -> its parts, in order
    args: Mapping[str, Any]  # arguments with other values


class _Sizes(NamedTuple):
    heads: int
    groups: int
    width: int
    is_gated: bool


def plan_pruning(config: RunConfig, targets: Targets, scores: Scores) -> PruningPlan:
    """Return which parts of a model are kept for ``targets``, which `check_targets` accepts.

    Layers with the lowest scores are dropped; every kept layer keeps its own best heads, neurons
    and experts; hidden channels are the same in all layers.
    """
    model = config.model
    heads, groups = _heads_and_groups(config, targets)
    layers = {}
    for index in _kept_layers(config, targets, scores):
        own = {part: scores.get(key(index, part)) for part in (HEADS, FFN, EXPERTS)}
        kept_groups, kept_heads = _best_heads(config, own[HEADS], heads, groups)
        layers[index] = LayerPlan(
            groups=kept_groups,
            heads=kept_heads,
            neurons=_best(own[FFN], targets.ffn_hidden_size),
            experts=_best(own[EXPERTS], targets.num_moe_experts),
        )
    changed = {
        "num_layers": len(layers),
        "encoder_num_layers": None,
        "hidden_size": targets.hidden_size or model.hidden_size,
        "ffn_hidden_size": targets.ffn_hidden_size or model.ffn_hidden_size,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": model.kv_channels,  # would follow from the hidden size
        "mtp_num_layers": None,
    }
    if model.num_moe_experts is not None:
        changed["num_experts"] = targets.num_moe_experts or model.num_moe_experts
        changed["moe_ffn_hidden_size"] = model.moe_ffn_hidden_size
    return PruningPlan(
        hidden=_best(scores.get(HIDDEN), targets.hidden_size), layers=layers, args=changed
    )


def check_targets(config: RunConfig, targets: Targets) -> None:
    """Raise ConfigError if a model of ``config`` cannot be pruned to ``targets``."""
    model = config.model
    heads, groups = _heads_and_groups(config, targets)
    of_group = _heads_of_group(config)
    dropped = targets.layers_to_drop
    wrong = [n for n in dropped if not 1 <= n <= model.num_layers]
    pattern = _pattern_of_layers(config)
    prunes_heads = targets.num_attention_heads or targets.num_query_groups
    sizes = [(name, getattr(targets, name), getattr(model, name) or 0) for name in _SIZES]
    rules = (
        (
            model.multi_latent_attention,
            "pruning is not implemented for --multi-latent-attention",
        ),
        (
            model.qk_layernorm_full_width and prunes_heads,
            "--qk-layernorm-full-width: norms over all heads, which cannot be pruned",
        ),
        *(
            (
                wanted is not None and not 1 <= wanted <= size,
                f"--target-{name.replace('_', '-')} {wanted}: the model has {size or 'none'}",
            )
            for name, wanted, size in sizes
        ),
        (
            groups < 1 or heads % groups or heads // groups > of_group,
            f"{heads} heads in {groups} groups: a group of the model has {of_group} heads, and all "
            "groups keep equally many: change --target-num-attention-heads or "
            "--target-num-query-groups",
        ),
        (
            0 < (targets.num_moe_experts or 0) < model.moe_router_topk,
            f"--target-num-moe-experts {targets.num_moe_experts} is below --moe-router-topk "
            f"{model.moe_router_topk}",
        ),
        (
            wrong or len({*dropped}) == model.num_layers,
            f"--layers-to-drop {wrong or 'all'}: layers are 1 to {model.num_layers}",
        ),
        (
            targets.num_layers and dropped,
            "--target-num-layers and --layers-to-drop exclude each other",
        ),
        (
            targets == Targets(),
            "no size is given: use --target-num-layers, --target-hidden-size or others",
        ),
        (
            (targets.num_layers or dropped) and pattern,
            f"{pattern} depends on the index of a layer: layers cannot be dropped",
        ),
    )
    ConfigError.raise_for(message for is_wrong, message in rules if is_wrong)


def _pattern_of_layers(config: RunConfig) -> str | None:
    """Return the flag by which layers of one index differ from others, or None."""
    model = config.model
    given = {
        "--moe-layer-freq": model.num_moe_experts and model.moe_layer_freq != 1,
        "--no-rope-freq": model.no_rope_freq,
        "--window-attn-skip-freq": model.window_attn_skip_freq,
        "--heterogeneous-layers-config-path": model.heterogeneous_layers_config_encoded_json,
    }
    return next((flag for flag, value in given.items() if value), None)


def _heads_of_group(config: RunConfig) -> int:
    return config.model.num_attention_heads // (config.model.num_query_groups or 1)


def _heads_and_groups(config: RunConfig, targets: Targets) -> tuple[int, int]:
    """Return the heads and query groups of the pruned model.

    All groups stay unless the targets give another number, or each head of ``config`` has a group.
    """
    heads = targets.num_attention_heads or config.model.num_attention_heads
    if targets.num_query_groups is not None:
        return heads, targets.num_query_groups
    if _heads_of_group(config) == 1:
        return heads, heads
    return heads, config.model.num_query_groups or config.model.num_attention_heads


def _kept_layers(config: RunConfig, targets: Targets, scores: Scores) -> list[int]:
    every = range(config.model.num_layers)
    if targets.layers_to_drop:
        return [i for i in every if i + 1 not in targets.layers_to_drop]
    if targets.num_layers is None:
        return list(every)
    best = _best([scores[key(i, LAYER)][0] for i in every], targets.num_layers)
    assert best is not None, "the number is given"
    return [int(i) for i in best]


def _best(scores: Sequence[float] | None, number: int | None) -> Tensor | None:
    """Return the indices of the ``number`` highest scores, ascending; of equal ones the first."""
    if number is None or scores is None:
        return None
    order = torch.tensor(scores, dtype=torch.float64).argsort(descending=True, stable=True)
    return order[:number].sort().values


def _best_heads(
    config: RunConfig, scores: Sequence[float] | None, num_heads: int, num_groups: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the kept groups, and the kept heads as numbers in the complete layer."""
    model = config.model
    is_same = (num_heads, num_groups) == (model.num_attention_heads, model.num_query_groups)
    if scores is None or is_same:
        return None, None
    each = torch.tensor(scores, dtype=torch.float64).view(-1, _heads_of_group(config))
    groups = _best(each.sum(1).tolist(), num_groups)
    assert groups is not None
    heads = [
        _best(each[group].tolist(), num_heads // num_groups) + group * each.shape[1]
        for group in groups.tolist()
    ]
    return groups, torch.cat(heads)


def prune(
    load: Path, save: Path, config: RunConfig, plan: PruningPlan, step: int | None = None
) -> Path:
    """Write the checkpoint ``load``, pruned by ``plan``, to ``save``; return the new folder.

    One process.  Raises CheckpointError for a tensor that the model is not known to have.
    """
    wanted = ConversionRequest(source=load, target=save, format="safetensors_dist", step=step)
    source = read_source(wanted)
    model = config.model
    sizes = _Sizes(
        model.num_attention_heads,
        model.num_query_groups or model.num_attention_heads,
        model.kv_channels or 0,
        model.gated_linear_unit,
    )
    numbers = {old: new for new, old in enumerate(plan.layers)}
    tensors = {}
    for name, tensor in source.tensors.items():
        if name.startswith((OPTIMIZER_PREFIX, _MTP)):
            continue
        found = _prune_tensor(name, tensor, plan, sizes, numbers)
        if found is not None:
            tensors[found.name] = found
    args = {**source.args, **plan.args}
    run_config(args)  # raises for a model that cannot be built
    smaller = replace(source, tensors=tensors, args=args, common={}, rank_states={}, layout={})
    return write_checkpoint(smaller, wanted)


def _prune_tensor(
    name: str, tensor: LazyTensor, plan: PruningPlan, sizes: _Sizes, numbers: Mapping[int, int]
) -> LazyTensor | None:
    """Return the tensor of the pruned model, with its new name; None if a part is dropped."""
    found = _OF_LAYER.fullmatch(name)
    if found is None:
        indices = _outside_layers(name, plan.hidden)
        return _slice(name, tensor, indices, name)
    index = int(found[1])
    own = found[2]
    if index not in plan.layers:
        return None
    layer = plan.layers[index]
    expert = _OF_EXPERT.fullmatch(own)
    if expert is not None and layer.experts is not None:
        places = {old: new for new, old in enumerate(layer.experts.tolist())}
        if int(expert[1]) not in places:
            return None
        own = f"mlp.experts.local_experts.{places[int(expert[1])]}.{expert[2]}"
    indices = _inside_layer(own, tensor, layer, plan.hidden, sizes)
    return _slice(name, tensor, indices, f"decoder.layers.{numbers[index]}.{own}")


Indices = Sequence[Tensor | None] | None  # of each dimension; None keeps all


def _outside_layers(name: str, hidden: Tensor | None) -> Indices:
    return {
        "embedding.word_embeddings.weight": (None, hidden),
        "embedding.position_embeddings.weight": (None, hidden),
        "output_layer.weight": (None, hidden),
        "output_layer.bias": (None,),
        "decoder.final_layernorm.weight": (hidden,),
        "decoder.final_layernorm.bias": (hidden,),
    }.get(name)


def _inside_layer(
    own: str, tensor: LazyTensor, layer: LayerPlan, hidden: Tensor | None, sizes: _Sizes
) -> Indices:
    """Return the indices of each dimension of the tensor ``own`` of a layer; None if unknown."""
    heads = layer.heads
    columns = None if heads is None else _expand(heads, sizes.width)
    is_of_expert = "experts." in own  # whose neurons are kept
    neurons = None if is_of_expert else layer.neurons
    rows = neurons
    if neurons is not None and sizes.is_gated:
        rows = torch.cat([neurons, neurons + tensor.shape[0] // 2])
    part, _, kind = own.rpartition(".")
    if is_of_expert:
        part = f"mlp.{part.rpartition('.')[2]}"
    table: dict[str, Indices] = {
        "self_attention.linear_qkv.weight": (_rows_of_qkv(layer, sizes), hidden),
        "self_attention.linear_qkv.bias": (_rows_of_qkv(layer, sizes),),
        "self_attention.linear_proj.weight": (hidden, columns),
        "self_attention.linear_proj.bias": (hidden,),
        "self_attention.core_attention.softmax_offset": (heads,),
        "self_attention.q_layernorm.weight": (None,),
        "self_attention.q_layernorm.bias": (None,),
        "self_attention.k_layernorm.weight": (None,),
        "self_attention.k_layernorm.bias": (None,),
        "mlp.linear_fc1.weight": (rows, hidden),
        "mlp.linear_fc1.bias": (rows,),
        "mlp.linear_fc2.weight": (hidden, neurons),
        "mlp.linear_fc2.bias": (hidden,),
        "mlp.router.weight": (layer.experts, hidden),
        "mlp.router.bias": (layer.experts,),
        "mlp.router.expert_bias": (layer.experts,),
        "mlp.shared_experts.gate_weight": (None, hidden),
    }
    if part.endswith("layernorm") and "." not in part:
        return (hidden,)
    return table.get(f"{part}.{kind}")


def _rows_of_qkv(layer: LayerPlan, sizes: _Sizes) -> Tensor | None:
    """Return the kept rows of the QKV projection: of each group queries, key and value."""
    if layer.groups is None or layer.heads is None:
        return None
    of_group = sizes.heads // sizes.groups
    blocks = []  # numbers of blocks of d rows
    for group in layer.groups.tolist():
        begin = group * (of_group + 2)
        mine = layer.heads[layer.heads // of_group == group] - group * of_group
        blocks += [begin + mine, torch.tensor([begin + of_group, begin + of_group + 1])]
    return _expand(torch.cat(blocks), sizes.width)


def _expand(blocks: Tensor, width: int) -> Tensor:
    """Return the indices of all elements of ``blocks`` of ``width`` elements."""
    return (blocks[:, None] * width + torch.arange(width)).flatten()


def _slice(name: str, tensor: LazyTensor, indices: Indices, new_name: str) -> LazyTensor:
    if indices is None or len(indices) != len(tensor.shape):
        raise CheckpointError(
            f"the checkpoint has the tensor {name} {list(tensor.shape)}, which pruning does not "
            "know: it supports GPT with attention of queries, keys and values"
        )
    shape = tuple(
        size if kept is None else len(kept)
        for size, kept in zip(tensor.shape, indices, strict=True)
    )
    return LazyTensor(new_name, tensor.dtype, shape, partial(_select, tensor, indices))


def _select(tensor: LazyTensor, indices: Sequence[Tensor | None]) -> Tensor:
    values = tensor.make()
    for dim, kept in enumerate(indices):
        if kept is not None:
            values = values.index_select(dim, kept)
    return values.contiguous()


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of pruning to ``parser``."""
    group = parser.add_argument_group("pruning")
    for name in _SIZES:
        flag = name.replace("_", "-")
        group.add_argument(
            f"--target-{flag}",
            type=int,
            help=f"--{flag} of the pruned model; unchanged if not given",
        )
    group.add_argument(
        "--layers-to-drop", type=int, nargs="+", help="numbers of layers to drop, from 1 on"
    )
    group.add_argument(
        "--calib-size", type=int, default=1024, help="calibration samples (default 1024)"
    )
    group.add_argument(
        "--pruning-scores-path",
        help="JSON file of the scores: read if it exists, otherwise measured and written",
    )
    return parser


def prune_checkpoint(config: RunConfig) -> None:
    """Prune --load to the sizes of the flags, and write --save.  Collective over all ranks."""
    checkpoint = config.checkpoint
    extra = config.extra
    for flag in ("load", "save"):
        if getattr(checkpoint, flag) is None:
            raise ConfigError(f"--{flag} is required: the directory of a checkpoint")
    targets = Targets(
        **{name: extra[f"target_{name}"] for name in _SIZES},
        layers_to_drop=tuple(extra["layers_to_drop"] or ()),
    )
    check_targets(config, targets)
    groups = install_groups(config)
    is_rank_0 = groups.world.rank() == 0
    path = extra["pruning_scores_path"]
    has_scores = path is not None and Path(path).exists()
    scores: Scores = {}
    if broadcast_json(has_scores, groups.world):
        what = f"--pruning-scores-path {path}"
        text = read_text(path, what, DataError)
        try:
            read = json.loads(text)
            scores = {str(name): [float(x) for x in values] for name, values in read.items()}
        except (ValueError, AttributeError, TypeError) as error:
            reason = f"{what} has no scores of a pruning run: {error}; remove it"
            raise DataError(reason) from None
    else:
        scores = measure(config, groups, extra["calib_size"])
        if path is not None and is_rank_0:
            Path(path).write_text(json.dumps(scores), encoding="utf-8")
    plan = plan_pruning(config, targets, scores)
    print_rank_0(f" layers that are kept: {', '.join(str(i + 1) for i in plan.layers)}")

    def write() -> None:
        if is_rank_0:
            assert checkpoint.load is not None
            assert checkpoint.save is not None
            prune(Path(checkpoint.load), Path(checkpoint.save), config, plan, checkpoint.ckpt_step)

    all_or_none(write, checkpoint.save, groups.world)


def measure(config: RunConfig, groups: ProcessGroupCollection, num_samples: int) -> Scores:
    """Load the model and return the scores of its parts on training samples.

    Collective over all ranks.
    """
    step = config.training.micro_batch_size * groups.dp.size()
    if num_samples < step:
        raise ConfigError(
            f"--calib-size {num_samples}: a step has {step} samples, --micro-batch-size times the "
            "data-parallel size: use at least so many"
        )
    context = create_context(config, groups)
    run = ModelRun(
        **vars(context),
        model_chunks=build_model_chunks(context, partial(build_stage, context), wrap=False),
        forward_step_func=partial(_forward_step, context),
    )
    run.load()
    train, *_ = build_datasets(run, (num_samples, 0, 0))
    data = chunk_iterators(run, make_loader(run, train, 0))
    for model in run.model_chunks:
        model.eval()
    importance = Importance(
        (get_attr_wrapped_model(m, "decoder", return_model_obj=True) for m in run.model_chunks),
        run.groups,
    )
    print_rank_0(f" measuring importance on {num_samples // step * step} samples ...")
    with torch.no_grad():
        forward_backward(
            run, data, num_samples // step, forward_only=True, collect_non_loss_data=True
        )
    importance.close()
    return importance.gather()


def _forward_step(
    run: RunContext, data: Iterator[dict[str, Tensor]] | None, model: nn.Module
) -> tuple[Any, Any]:
    batch = next_batch(run, data, model)
    return implementation_of(run.config).apply(model, batch), _nothing


def _nothing(_output: Tensor, *, non_loss_data: bool) -> None:
    assert non_loss_data, "no loss is needed"
