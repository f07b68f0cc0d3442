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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError, ConfigError, DataError
from megatron.core.dist_checkpointing.records import OPTIMIZER_PREFIX
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
from megatron.post_training.reference import score
from megatron.training.config.run import RunConfig
from megatron.training.conversion.convert import (
    ConversionRequest,
    read_source,
    run_config,
    write_checkpoint,
)
from megatron.training.data.datasets import build_datasets
from megatron.training.data.loaders import make_loader
from megatron.training.initialize import create_context, install_groups
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.setup import build_model_chunks, build_stage
from megatron.training.step.run import ModelRun

_OF_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OF_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_SIZES = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups num_moe_experts"
).split()
Targets: TypeAlias = Mapping[str, Any]  # values of the flags; None keeps a size
# Axis -> indices that are kept, in ascending order; None, or no entry, keeps all.
Kept: TypeAlias = Mapping[str, Tensor | None]
# Name of a tensor, without "decoder.layers.N." -> its axes; "-" is kept completely.
_EXPERT = r"mlp\.(?:experts\.local_experts\.\d+|shared_experts)"
_AXES = {
    r"embedding\.(word|position)_embeddings\.weight": "- hidden",
    r"output_layer\.weight": "- hidden",
    r"output_layer\.bias": "-",
    r"(decoder\.final_|\w+_)layernorm\.(weight|bias)": "hidden",
    r"self_attention\.linear_qkv\.weight": "qkv hidden",
    r"self_attention\.linear_qkv\.bias": "qkv",
    r"self_attention\.[qk]_layernorm\.(weight|bias)": "-",
    r"self_attention\.core_attention\.softmax_offset": "heads",
    r"self_attention\.linear_proj\.weight": "hidden columns",
    r"self_attention\.linear_proj\.bias": "hidden",
    r"mlp\.linear_fc1\.weight": "rows hidden",
    r"mlp\.linear_fc1\.bias": "rows",
    r"mlp\.linear_fc2\.weight": "hidden neurons",
    r"mlp\.linear_fc2\.bias": "hidden",
    r"mlp\.router\.weight": "experts hidden",
    r"mlp\.router\.(expert_)?bias": "experts",
    rf"{_EXPERT}\.linear_fc1\.weight": "- hidden",  # all neurons of experts are kept
    rf"{_EXPERT}\.linear_fc1\.bias": "-",
    rf"{_EXPERT}\.linear_fc2\.weight": "hidden -",
    rf"{_EXPERT}\.linear_fc2\.bias": "hidden",
    r"mlp\.shared_experts\.gate_weight": "- hidden",
}


def plan_pruning(
    config: RunConfig, targets: Targets, scores: Scores
) -> tuple[dict[int | None, Kept], dict[str, Any]]:
    """Return what is kept for ``targets``, which `check_targets` accepts, and changed arguments.

    The first is by old index of the layer, in order; None: outside of layers.  Layers with the
    lowest scores are dropped; every kept layer keeps its own best heads, neurons and experts;
    hidden channels are the same in all layers.
    """
    model = config.model
    heads, groups = _heads_and_groups(config, targets)
    hidden = _best(scores.get(HIDDEN), targets["hidden_size"])
    kept: dict[int | None, Kept] = {None: {"hidden": hidden}}
    for index in _kept_layers(config, targets, scores):
        own = {part: scores.get(key(index, part)) for part in (HEADS, FFN, EXPERTS)}
        neurons = _best(own[FFN], targets["ffn_hidden_size"])
        rows = neurons
        if neurons is not None and model.gated_linear_unit:
            rows = torch.cat([neurons, neurons + (model.ffn_hidden_size or 0)])
        kept[index] = {
            "hidden": hidden,
            "neurons": neurons,
            "rows": rows,
            "experts": _best(own[EXPERTS], targets["num_moe_experts"]),
            **_best_heads(config, own[HEADS], heads, groups),
        }
    args = {
        "num_layers": len(kept) - 1,
        "encoder_num_layers": None,
        "hidden_size": targets["hidden_size"] or model.hidden_size,
        "ffn_hidden_size": targets["ffn_hidden_size"] or model.ffn_hidden_size,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": model.kv_channels,  # would follow from the hidden size
        "mtp_num_layers": None,
    }
    if model.num_moe_experts is not None:
        args["num_experts"] = targets["num_moe_experts"] or model.num_moe_experts
        args["moe_ffn_hidden_size"] = model.moe_ffn_hidden_size
    return kept, args


def check_targets(config: RunConfig, targets: Targets) -> None:
    """Raise ConfigError if a model of ``config`` cannot be pruned to ``targets``."""
    model = config.model
    heads, groups = _heads_and_groups(config, targets)
    of_group = _heads_of_group(config)
    dropped = targets["layers_to_drop"] or ()
    wrong = [n for n in dropped if not 1 <= n <= model.num_layers]
    # Flags by which layers of one index differ from others.
    patterns = {
        "--moe-layer-freq": model.num_moe_experts and model.moe_layer_freq != 1,
        "--no-rope-freq": model.no_rope_freq,
        "--window-attn-skip-freq": model.window_attn_skip_freq,
        "--heterogeneous-layers-config-path": model.heterogeneous_layers_config_encoded_json,
    }
    sized = targets["num_attention_heads"] or targets["num_query_groups"]
    num_experts = targets["num_moe_experts"] or 0
    problems = {
        "pruning is not implemented for --multi-latent-attention": model.multi_latent_attention,
        "pruning is not implemented for --moe-latent-size": model.moe_latent_size,
        "pruning is not implemented for --enable-mhc-connections": model.enable_mhc_connections,
        "pruning is not implemented for --experimental-attention-variant and "
        "--attention-output-gate": (
            model.experimental_attention_variant or model.attention_output_gate
        ),
        "--qk-layernorm-full-width: norms over all heads, which cannot be pruned": (
            model.qk_layernorm_full_width and sized
        ),
        f"{heads} heads in {groups} groups: a group of the model has {of_group} heads, and all "
        "groups keep equally many: change --target-num-attention-heads or "
        "--target-num-query-groups": (groups < 1 or heads % groups or heads // groups > of_group),
        f"--target-num-moe-experts {num_experts} is below --moe-router-topk "
        f"{model.moe_router_topk}": 0 < num_experts < model.moe_router_topk,
        f"--layers-to-drop {wrong or 'all'}: layers are 1 to {model.num_layers}": (
            wrong or len({*dropped}) == model.num_layers
        ),
        "--target-num-layers and --layers-to-drop exclude each other": (
            targets["num_layers"] and dropped
        ),
        "no size is given: use --target-num-layers, --target-hidden-size or others": (
            not any(targets.values())
        ),
    }
    for flag, value in patterns.items():
        text = f"{flag} depends on the index of a layer: layers cannot be dropped"
        problems[text] = value and (targets["num_layers"] or dropped)
    for name in _SIZES:
        size = getattr(model, name) or 0
        wanted = targets[name]
        text = f"--target-{name.replace('_', '-')} {wanted}: the model has {size or 'none'}"
        problems[text] = wanted is not None and not 1 <= wanted <= size
    ConfigError.raise_for(message for message, is_wrong in problems.items() if is_wrong)


def _heads_of_group(config: RunConfig) -> int:
    return config.model.num_attention_heads // (config.model.num_query_groups or 1)


def _heads_and_groups(config: RunConfig, targets: Targets) -> tuple[int, int]:
    """Return the heads and query groups of the pruned model.

    All groups stay unless the targets give another number, or each head of ``config`` has a group.
    """
    model = config.model
    heads = targets["num_attention_heads"] or model.num_attention_heads
    of_model = heads if _heads_of_group(config) == 1 else model.num_query_groups
    groups = targets["num_query_groups"]
    return heads, (of_model or model.num_attention_heads) if groups is None else groups


def _kept_layers(config: RunConfig, targets: Targets, scores: Scores) -> list[int]:
    every = range(config.model.num_layers)
    if targets["num_layers"] is None:
        return [i for i in every if i + 1 not in (targets["layers_to_drop"] or ())]
    of_layers = [scores[key(i, LAYER)][0] for i in every]
    return [int(i) for i in _best(of_layers, targets["num_layers"])]


def _best(scores: Sequence[float] | None, number: int | None) -> Any:
    """Return the indices of the ``number`` highest scores, ascending; of equal ones the first."""
    if number is None or scores is None:
        return None
    order = torch.tensor(scores, dtype=torch.float64).argsort(descending=True, stable=True)
    return order[:number].sort().values


def _best_heads(
    config: RunConfig, scores: Sequence[float] | None, num_heads: int, num_groups: int
) -> Kept:
    """Return the kept heads of a layer, rows of its QKV and columns of its output projection."""
    model = config.model
    is_same = (num_heads, num_groups) == (model.num_attention_heads, model.num_query_groups)
    if scores is None or is_same:
        return {}
    size = _heads_of_group(config)
    width = model.kv_channels or 0
    each = torch.tensor(scores, dtype=torch.float64).view(-1, size)
    heads = []
    blocks = []  # numbers of blocks of d rows: of each group queries, key and value
    for group in _best(each.sum(1).tolist(), num_groups).tolist():
        best = _best(each[group].tolist(), num_heads // num_groups)
        begin = group * (size + 2)
        heads.append(best + group * size)
        blocks += [begin + best, torch.tensor([begin + size, begin + size + 1])]
    return {
        "heads": torch.cat(heads),
        "columns": _expand(torch.cat(heads), width),
        "qkv": _expand(torch.cat(blocks), width),
    }


def _expand(blocks: Tensor, width: int) -> Tensor:
    """Return the indices of all elements of ``blocks`` of ``width`` elements."""
    return (blocks[:, None] * width + torch.arange(width)).flatten()


def prune(
    load: Path,
    save: Path,
    kept: Mapping[int | None, Kept],
    args: Mapping[str, Any],
    step: int | None = None,
) -> None:
    """Write the checkpoint ``load``, pruned to ``kept``, to ``save``, with changed ``args``.

    One process.  Raises CheckpointError for a tensor that the model is not known to have.
    """
    wanted = ConversionRequest(source=load, target=save, format="safetensors_dist", step=step)
    source = read_source(wanted)
    tensors = {}
    for name, tensor in source.tensors.items():
        if not name.startswith((OPTIMIZER_PREFIX, "mtp.")):
            found = _prune_tensor(name, tensor, kept)
            if found is not None:
                tensors[found.name] = found
    args = {**source.args, **args}
    run_config(args)  # raises for a model that cannot be built
    smaller = replace(source, tensors=tensors, args=args, common={}, rank_states={}, layout={})
    write_checkpoint(smaller, wanted)


def _prune_tensor(
    name: str, tensor: LazyTensor, kept: Mapping[int | None, Kept]
) -> LazyTensor | None:
    """Return the tensor of the pruned model, with its new name; None if a part is dropped."""
    index = None
    own = name
    new_name = name
    of_layer = _OF_LAYER.fullmatch(name)
    if of_layer is not None:
        index = int(of_layer[1])
        own = of_layer[2]
        if index not in kept:
            return None
        new_name = own
        expert = _OF_EXPERT.fullmatch(own)
        experts = kept[index].get("experts")
        if expert is not None and experts is not None:
            numbers = experts.tolist()
            if int(expert[1]) not in numbers:
                return None
            new_name = f"mlp.experts.local_experts.{numbers.index(int(expert[1]))}.{expert[2]}"
        new_name = f"decoder.layers.{list(kept).index(index) - 1}.{new_name}"
    axes = next((axes for pattern, axes in _AXES.items() if re.fullmatch(pattern, own)), "")
    if len(axes.split()) != len(tensor.shape):
        raise CheckpointError(
            f"the checkpoint has the tensor {name} {list(tensor.shape)}, which pruning does not "
            "know: it supports GPT with attention of queries, keys and values"
        )
    indices = [kept[index].get(axis) for axis in axes.split()]
    sizes = zip(tensor.shape, indices, strict=True)
    shape = tuple(size if chosen is None else len(chosen) for size, chosen in sizes)
    return LazyTensor(new_name, tensor.dtype, shape, partial(_select, tensor, indices))


def _select(tensor: LazyTensor, indices: Sequence[Tensor | None]) -> Tensor:
    values = tensor.make()
    for dim, chosen in enumerate(indices):
        if chosen is not None:
            values = values.index_select(dim, chosen)
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
    load = config.checkpoint.load
    save = config.checkpoint.save
    if load is None or save is None:
        flag = "load" if load is None else "save"
        raise ConfigError(f"--{flag} is required: the directory of a checkpoint")
    targets = {name: config.extra[f"target_{name}"] for name in _SIZES}
    targets["layers_to_drop"] = config.extra["layers_to_drop"]
    check_targets(config, targets)
    groups = install_groups(config)
    is_rank_0 = groups.world.rank() == 0
    path = config.extra["pruning_scores_path"]
    scores: Scores = {}
    if broadcast_json(path is not None and Path(path).exists(), groups.world):
        what = f"--pruning-scores-path {path}"
        text = read_text(path, what, DataError)
        try:
            read = json.loads(text)
            scores = {str(name): [float(x) for x in values] for name, values in read.items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise DataError(f"{what} has no scores of a pruning run: {error}; remove it") from None
    else:
        scores = measure(config, groups, config.extra["calib_size"])
        if path is not None and is_rank_0:
            Path(path).write_text(json.dumps(scores), encoding="utf-8")
    kept, args = plan_pruning(config, targets, scores)
    numbers = [str(i + 1) for i in kept if i is not None]
    print_rank_0(f" layers that are kept: {', '.join(numbers)}")

    def write() -> None:
        if is_rank_0:
            prune(Path(load), Path(save), kept, args, config.checkpoint.ckpt_step)

    all_or_none(write, save, groups.world)


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
        forward_step_func=score,  # which has its own
    )
    run.load()
    train, *_ = build_datasets(run, (num_samples, 0, 0))
    importance = Importance(
        (get_attr_wrapped_model(m, "decoder", return_model_obj=True) for m in run.model_chunks),
        run.groups,
    )
    print_rank_0(f" measuring importance on {num_samples // step * step} samples ...")
    score(run, make_loader(run, train, 0), num_samples // step, lambda _batch, _output: {})
    return importance.gather()
