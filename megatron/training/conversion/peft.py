"""Adapters in files of the PEFT library: adapter_config.json and adapter_model.safetensors.

A part of a layer (q, k and v; gate and up) corresponds to one matrix of Hugging Face's models, so
its A and B are those of PEFT's file.  Where theirs is one matrix with several parts, PEFT has one A
of a larger rank, and a B that is block-diagonal; that of a matrix read here may be any.

Each expert has its own matrices in the files written here, as in Hugging Face's.  PEFT itself, with
a `transformers` that keeps all experts of a layer in one tensor, writes one A [experts * r, i] and
one B [o, r * experts]; both are read.

PEFT may give matrices different ranks and scales.  Here all have one: smaller ranks are filled with
zeros, and B takes the ratio of the scales.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Arguments, JsonObject
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor, write_file
from megatron.core.peft.lora import (
    ALL_LINEAR,
    SAVED_MODULES,
    WHOLE,
    LoraConfig,
    is_of_adapter,
    split_name,
    stack_rows,
)
from megatron.training.config.adapters import AdaptersConfig
from megatron.training.conversion.family import Family
from megatron.training.conversion.hf import SCORE
from megatron.training.conversion.hf_folder import read_json, read_safetensors
from megatron.training.conversion.lazy import as_lazy
from megatron.training.conversion.shape import ModelShape
from megatron.training.conversion.tensors import Rule, group_rows, tensors_of

EMBEDDING = "embedding.word_embeddings"
_OUTPUT = "output_layer"
_EMBEDDING = f"{EMBEDDING}.weight"
_OUTPUT_WEIGHT = f"{_OUTPUT}.weight"
FLAGS = (
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_use_rslora",
    "lora_use_dora",
    "lora_modules_to_save",
)
_MAGNITUDE = "lora_magnitude_vector"


@dataclass(frozen=True)
class Pair:
    """A [r, i] and B [o, r] of one matrix; its weight grows by scale * B A.

    ``m`` [o]: with DoRA the norms of its rows afterwards.
    """

    a: Tensor
    b: Tensor
    scale: float
    m: Tensor | None = None


def lora_of(args: Arguments) -> LoraConfig:
    """Return the settings of the adapters that a checkpoint's command line describes."""
    given = {name: args[name] for name in FLAGS if args.get(name) is not None}
    given["lora_target_modules"] = tuple(given.get("lora_target_modules", (ALL_LINEAR,)))
    given["lora_modules_to_save"] = tuple(given.get("lora_modules_to_save", ()))
    found = AdaptersConfig(**given).lora
    if found is None:
        raise CheckpointError("the checkpoint names a base and no --lora-rank")
    return found


def merged(
    weights: Mapping[str, LazyTensor], args: Arguments, shape: ModelShape
) -> dict[str, LazyTensor]:
    """Return the weights of the base with the adapters added, computed in float32.

    Raises CheckpointError for an adapter of a tied embedding or output layer.
    """
    out = {name: tensor for name, tensor in weights.items() if not is_of_adapter(name)}
    for layer, pairs in pairs_of(weights, lora_of(args), shape).items():
        name = f"{layer}.weight"
        if name not in out or (layer == EMBEDDING and shape.is_tied):
            raise CheckpointError(
                f"the adapter of {layer} cannot be merged: embedding and output layer share one "
                "weight; train without an adapter there, or with "
                "--untie-embeddings-and-output-weights"
            )
        tensor = out[name]
        make = partial(_sum, tensor, pairs, rows_of(layer, tensor.shape, shape), layer)
        out[name] = LazyTensor(name, tensor.dtype, tensor.shape, make)
    return out


def _sum(
    tensor: LazyTensor, pairs: Mapping[str, Pair], rows: Mapping[str, int], layer: str
) -> Tensor:
    weight = tensor.make()
    groups = weight.shape[0] // max(1, sum(rows.values()))
    deltas = {part: (p.b.float() @ p.a.float()) * p.scale for part, p in pairs.items()}
    if WHOLE in deltas:
        delta = deltas[WHOLE].t() if layer == EMBEDDING else deltas[WHOLE]
    else:
        delta = _stack(deltas, rows, groups)
    if len(delta) < len(weight):  # padding of the vocabulary
        delta = F.pad(delta, (0, 0, 0, len(weight) - len(delta)))
    total = weight.float() + delta
    magnitudes = {part: p.m.float().unsqueeze(1) for part, p in pairs.items() if p.m is not None}
    if magnitudes:
        m = magnitudes[WHOLE] if WHOLE in magnitudes else _stack(magnitudes, rows, groups)
        m = F.pad(m, (0, 0, 0, len(weight) - len(m)))
        total = torch.where(m == 0, total, m / total.norm(dim=1, keepdim=True) * total)
    return total.to(weight.dtype)


def _stack(parts: Mapping[str, Tensor], rows: Mapping[str, int], groups: int) -> Tensor:
    """Stack the rows of parts as a layer orders them; the rows of a part without values are 0."""
    columns = [parts[part].t() if part in parts else None for part in rows]
    like = next(each for each in columns if each is not None)
    return stack_rows(columns, tuple(rows.values()), like, groups).t()


def pairs_of(
    weights: Mapping[str, LazyTensor], config: LoraConfig, shape: ModelShape
) -> dict[str, dict[str, Pair]]:
    """Return the matrices of all adapters by layer and part, without padding of the vocabulary.

    An embedding has [r, v] and [h, r], as in PEFT.
    """
    found: dict[str, dict[str, Pair]] = {}
    for name in sorted(filter(is_of_adapter, weights)):
        layer, matrix, part = split_name(name)
        if matrix != "a":
            continue
        a = weights[name].make()
        b = weights[f"{name[:-1]}b"].make()
        a = a[: shape.vocab_size].t() if layer == EMBEDDING else a
        b = b[: shape.vocab_size] if layer == _OUTPUT else b
        m = weights[f"{name[:-1]}m"].make() if config.use_dora else None
        m = m[: shape.vocab_size] if m is not None and layer == _OUTPUT else m
        found.setdefault(layer, {})[part] = Pair(a, b, config.scale, m)
    return found


def rows_of(layer: str, size: Sequence[int], shape: ModelShape) -> dict[str, int]:
    """Return the parts of a layer's weight of shape ``size``, with their rows in one group."""
    own = layer.rsplit(".", 1)[-1]
    if own == "linear_qkv":
        return dict(zip("qkv", group_rows(shape), strict=True))
    if own == "linear_fc1" and shape.is_gated:
        return {"gate": size[0] // 2, "up": size[0] // 2}
    return {WHOLE: size[0]}


CONFIG = "adapter_config.json"
_ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "lora_bias": (None, False),
    "bias": (None, "none"),
}
_TOO_LARGE = 1e6
# Patterns for which Python's `re` could search for hours: repeated groups, and many repetitions.
_REPEATED_GROUP = re.compile(r"\)[*+?{]*[*+{]")
_MOST_REPETITIONS = 3
_MOST_LETTERS = 1000


def read_config(folder: Path) -> JsonObject:
    """Return adapter_config.json.  Raises CheckpointError for adapters of another kind.

    Ranks are read from the shapes of the tensors.
    """
    path = folder / CONFIG
    config = read_json(path)
    for name, values in _ONLY.items():
        if (found := config.get(name)) not in values:
            raise CheckpointError(f"{path} has {name} {str(found)[:80]}: only {values[-1]} is read")
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, dict):
        raise CheckpointError(
            f"{path} has an alpha_pattern that is not a table of names and numbers"
        )
    for pattern in alphas:
        if not _is_pattern(pattern):
            raise CheckpointError(
                f"{path} has the pattern {pattern[:80]!r}: a name of modules is needed, or a "
                f"regular expression of at most {_MOST_REPETITIONS} repetitions, none of a group"
            )
    for alpha in (config.get("lora_alpha", 8), *alphas.values()):
        if not isinstance(alpha, int | float) or not 0 < alpha < _TOO_LARGE:
            raise CheckpointError(
                f"{path} has lora_alpha {str(alpha)[:80]}: give numbers above 0 and below "
                f"{_TOO_LARGE:.0f}"
            )
    dropout = config.get("lora_dropout") or 0.0
    if not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
        raise CheckpointError(
            f"{path} has lora_dropout {str(dropout)[:80]}: give a number from 0 to 1"
        )
    return config


def _is_pattern(pattern: str) -> bool:
    repetitions = sum(map(pattern.count, "*+{"))
    if repetitions > _MOST_REPETITIONS or _REPEATED_GROUP.search(pattern):
        return False
    try:
        return len(pattern) <= _MOST_LETTERS and bool(re.compile(pattern))
    except (re.error, OverflowError, RecursionError):
        return False


def _take_modules(
    folder: Path,
    config: JsonObject,
    left: dict[str, Tensor],
    shape: ModelShape,
    family: Family,
) -> dict[str, Tensor]:
    """Remove complete modules from ``left``; return our tensors.  Raises CheckpointError."""
    modules = config.get("modules_to_save") or []
    known = ("score", "classifier")  # PEFT lists both names of a classifier's head
    found: dict[str, Tensor] = {}
    matched: set[str] = set()
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise CheckpointError(
            f"{folder / CONFIG} has modules_to_save {str(modules)[:80]}: give a list of names"
        )
    for name, size in tensors_of(shape).items():
        if name.split(".")[-2] not in SAVED_MODULES or name == SCORE:
            continue
        rule = family.rule(name, shape)
        (theirs,) = rule.theirs if len(rule.theirs) == 1 else ("",)
        named = [each for each in modules if theirs.rpartition(".")[0].endswith(each)]  # as PEFT
        if named and theirs in left:
            matched.update(named)
            found[name] = rule.to_ours([left.pop(theirs)], shape)
            if tuple(found[name].shape) != tuple(size) or (shape.is_tied and name == _EMBEDDING):
                raise CheckpointError(
                    f"{folder / WEIGHTS}: {theirs} {list(found[name].shape)} does not fit the "
                    f"model, where it is {list(size)}{' and tied' * shape.is_tied}"
                )
    if unknown := set(modules) - matched - set(known):
        raise CheckpointError(
            f"{folder / CONFIG} has modules_to_save {', '.join(sorted(unknown))[:80]}: "
            f"{WEIGHTS} must hold their weights, and only {', '.join(SAVED_MODULES)} of the "
            "model, and a reward model's score, can be read"
        )
    score = _take_score(folder, left, shape) if set(modules) & set(known) else None
    return found if score is None else {**found, SCORE: score}


def _take_score(folder: Path, left: dict[str, Tensor], shape: ModelShape) -> Tensor:
    """Remove the score of a reward model from ``left`` and return it.  Raises CheckpointError."""
    score = left.pop(SCORE, None)
    if score is None:
        raise CheckpointError(
            f"{folder / CONFIG} has modules_to_save, and {WEIGHTS} no {SCORE}: get the folder again"
        )
    if list(score.shape) != [1, shape.hidden_size]:
        raise CheckpointError(
            f"{folder / WEIGHTS} has a {SCORE} of shape {list(score.shape)}: only classifiers of "
            "one label, which are reward models, can be converted"
        )
    return score


WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
_STACK = re.compile(r"(.*\.experts)\.(base_layer\.)?lora_([AB])\.weight")
_PART_NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "gate": "gate_proj", "up": "up_proj"}
_OF_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def write_peft(
    folder: Path,
    weights: Mapping[str, LazyTensor],
    args: Arguments,
    shape: ModelShape,
    family: Family,
    base_name: str | None,
) -> str | None:
    """Write adapter_config.json and adapter_model.safetensors into ``folder``.

    Returns a warning about adapters that PEFT will not load, or None.  Raises CheckpointError for a
    layer that has no place in PEFT's files.
    """
    config = lora_of(args)
    tensors: dict[str, Tensor] = {}
    modules: set[str] = set()
    ranks: dict[str, int] = {}
    transposed = False
    for layer, pairs in pairs_of(weights, config, shape).items():
        rule = family.rule(f"{layer}.weight", shape)
        if rule.by_turns or rule.rows is not None:
            raise CheckpointError(
                f"{family.architecture} has the rows of {layer} in another order: its adapters "
                "cannot be converted; choose other --lora-target-modules"
            )
        if any(theirs[-1].isdigit() for theirs in rule.theirs):
            raise CheckpointError(
                f"{family.architecture} has the matrices of all experts in one tensor: the adapter "
                f"of {layer} cannot be converted; choose other --lora-target-modules"
            )
        transposed |= rule.transposed
        for theirs, pair in _their_pairs(layer, pairs, rule, shape):
            module = theirs.removesuffix(".weight")
            kind = "lora_embedding_{}" if layer == EMBEDDING else "lora_{}.weight"
            tensors[f"{_PREFIX}{module}.{kind.format('A')}"] = pair.a
            tensors[f"{_PREFIX}{module}.{kind.format('B')}"] = pair.b
            if pair.m is not None:
                tensors[f"{_PREFIX}{module}.{_MAGNITUDE}"] = pair.m
            modules.add(_short(module))
            if len(pair.a) != config.rank:
                ranks[_short(module)] = len(pair.a)
    if shape.is_reward:
        tensors[f"{_PREFIX}{SCORE}"] = weights[SCORE].make()
    saved = {"score"} if shape.is_reward else set()
    for name in filter(config.saves, weights):
        value = weights[name].make()
        value = value[: shape.vocab_size] if name in (_EMBEDDING, _OUTPUT_WEIGHT) else value
        rule = family.rule(name, shape)
        for theirs, part in zip(rule.theirs, rule.to_theirs(value, shape), strict=True):
            tensors[f"{_PREFIX}{theirs}"] = part
            module = theirs.rpartition(".")[0]  # PEFT compares the ends of names
            saved.add(_short(module) if ".layers." in module else module)
    warning = _check_experts(tensors)
    written = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if shape.is_reward else "CAUSAL_LM",
        "modules_to_save": sorted(saved) or None,
        "base_model_name_or_path": base_name,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": 0.0,  # it is for training, and PEFT refuses it beside experts
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "target_modules": sorted(modules),
        "rank_pattern": ranks,
        "alpha_pattern": {
            name: config.scale * (rank**0.5 if config.use_rslora else rank)
            for name, rank in ranks.items()
        },
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    lazy = as_lazy({name: tensor.contiguous() for name, tensor in sorted(tensors.items())})
    write_file(folder / WEIGHTS, list(lazy.values()), {"format": "pt"}, step=0)
    return warning


def _short(module: str) -> str:
    return module.rsplit(".", 1)[-1]


def _check_experts(names: Iterable[str]) -> str | None:
    """Return a warning about adapters that PEFT does not load beside those of experts, or None.

    Raises CheckpointError for an expert with one of gate and up projection.
    """
    every = [name.removeprefix(_PREFIX).split(".lora_")[0] for name in names]
    of_experts = {found[3] for name in every if (found := _EXPERT.fullmatch(name))}
    for pair in ({"gate_proj", "up_proj"}, {"w1", "w3"}):
        if len(pair & of_experts) == 1:
            raise CheckpointError(
                f"PEFT adapts {' and '.join(sorted(pair))} of experts together: train adapters of "
                "both"
            )
    also = {name for name in every if _short(name) in of_experts and not _EXPERT.fullmatch(name)}
    if not also:
        return None
    return (
        "WARNING: PEFT with transformers 5 takes gate_proj, up_proj and down_proj for experts, and "
        f"ignores the adapters of {min(also)}; train --lora-target-modules experts.linear_fc1 "
        "experts.linear_fc2 instead of all layers of these names"
    )


def _their_pairs(
    layer: str, pairs: Mapping[str, Pair], rule: Rule, shape: ModelShape
) -> Iterator[tuple[str, Pair]]:
    """Yield their name of each matrix with its A and B."""
    parts = list(rows_of(layer, (2,), shape))
    if len(parts) == len(rule.theirs):
        yield from (
            (t, pairs[part]) for part, t in zip(parts, rule.theirs, strict=True) if part in pairs
        )
        return
    if len(rule.theirs) != 1 or set(pairs) != set(parts):
        raise CheckpointError(
            f"the adapter of {layer} has no counterpart in PEFT's files: theirs is "
            f"{', '.join(rule.theirs)}; train adapters of all of its parts"
        )
    every = [pairs[part] for part in parts]
    if all(torch.equal(pair.a, every[0].a) for pair in every):  # as read from such a file
        a = every[0].a
        b = torch.cat([pair.b for pair in every])
    else:
        a = torch.cat([pair.a for pair in every])
        b = torch.block_diag(*[pair.b for pair in every])
    magnitudes = [pair.m for pair in every if pair.m is not None]
    yield rule.theirs[0], Pair(a, b, every[0].scale, torch.cat(magnitudes) if magnitudes else None)


def read_peft(
    folder: Path, shape: ModelShape, family: Family, dtype: torch.dtype
) -> tuple[dict[str, LazyTensor], dict[str, object]]:
    """Read a folder of PEFT; return our tensors and the flags of the adapters.

    Raises CheckpointError for adapters of another kind or of layers that the model has not.
    """
    config = read_config(folder)
    left = dict(_entries(read_safetensors(folder / WEIGHTS), shape.num_experts or 1))
    saved = _take_modules(folder, config, left, shape, family)
    sizes = {
        name.removesuffix(".weight"): size
        for name, size in tensors_of(shape).items()
        if name.endswith(".weight") and len(size) == 2
    }
    found: dict[tuple[str, str], Pair] = {}  # by layer and part
    for layer, size in sizes.items():
        rule = family.rule(f"{layer}.weight", shape)
        if all(name.endswith(".weight") or _EXPERT.search(name) for name in rule.theirs):
            pairs = _our_pairs(layer, size, rule, left, config, shape)
            found |= {(layer, part): pair for part, pair in pairs.items()}
    if left:
        raise CheckpointError(
            f"{folder} has adapters of layers that are not in the model: "
            f"{', '.join(sorted(left)[:3])}"
        )
    if not found:
        raise CheckpointError(f"{folder} holds no adapter")
    rank = max(len(pair.a) for pair in found.values())
    scale = next(iter(found.values())).scale
    kinds = {(*_kind_of(layer), part): pair for (layer, part), pair in found.items()}
    values = dict(saved)
    for layer, size in sizes.items():
        rows = rows_of(layer, size, shape)
        for part, in_group in rows.items():
            own = (size[0] // sum(rows.values()) * in_group, size[1])
            pair = found.get((layer, part))
            like = kinds.get((*_kind_of(layer), part))
            if pair is None and like is not None and like.m is not None:
                raise CheckpointError(
                    f"{folder} has DoRA in some layers alone, not in {layer}: train it in all "
                    "layers of the same names"
                )
            if pair is None and like is not None:
                # With A and B zero their gradients are zero: it stays untrained, as in PEFT.
                pair = Pair(like.a.new_zeros(1, own[1]), like.b.new_zeros(own[0], 1), scale)
            if pair is not None:
                _check_size(layer, pair, own)
                values |= _ours(layer, part, pair, rank, scale)
    targets = {
        f"{kind}.{_PART_NAMES[part]}" if part else f"{kind}.{own}".removeprefix(".")
        for kind, own, part in kinds
    }
    flags = {
        "lora_rank": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": config.get("lora_dropout") or 0.0,
        "lora_use_rslora": False,
        "lora_use_dora": bool(config.get("use_dora")),
        "lora_target_modules": sorted(targets),
        "lora_modules_to_save": sorted({n.split(".")[-2] for n in saved if n != SCORE}),
        **({"reward_model": True} if SCORE in saved else {}),
    }
    return as_lazy({name: value.to(dtype).contiguous() for name, value in values.items()}), flags


def _check_size(layer: str, pair: Pair, size: tuple[int, int]) -> None:
    """Raise CheckpointError unless B A has the size of the matrix, a part of a layer's weight."""
    wanted = size[::-1] if layer == EMBEDDING else size
    found = len(pair.b), pair.a.shape[1]
    has_magnitudes = pair.m is None or tuple(pair.m.shape) == wanted[:1]
    if found != wanted or len(pair.a) != pair.b.shape[1] or not has_magnitudes:
        raise CheckpointError(
            f"the adapter of {layer} has A {list(pair.a.shape)} and B {list(pair.b.shape)}, of a "
            f"matrix that is {list(wanted)}: it is of another model"
        )


def _kind_of(layer: str) -> tuple[str, str]:
    """Return the names of the module around a layer and of the layer."""
    *around, own = re.sub(r"\.local_experts\.\d+\.", ".", layer).split(".")
    return around[-1] if around else "", own


def _ours(
    layer: str, part: str, pair: Pair, rank: int, scale: float
) -> Iterator[tuple[str, Tensor]]:
    own = f"{layer}.lora.{part}_" if part else f"{layer}.lora."
    spare = rank - len(pair.a)
    a = F.pad(pair.a, (0, 0, 0, spare))
    b = F.pad(pair.b, (0, spare))
    yield f"{own}a", a.t() if layer == EMBEDDING else a
    yield f"{own}b", b if pair.scale == scale else b * (pair.scale / scale)
    if pair.m is not None:
        yield f"{own}m", pair.m


def _our_pairs(
    layer: str,
    size: tuple[int, ...],
    rule: Rule,
    left: dict[str, Tensor],
    config: JsonObject,
    shape: ModelShape,
) -> dict[str, Pair]:
    """Remove the adapters of one of our layers from ``left`` and return them by part."""
    modules = [theirs.removesuffix(".weight") for theirs in rule.theirs]
    taken = [_take(left, module, config) for module in modules]
    if not any(taken):
        return {}
    if rule.by_turns or rule.rows is not None:
        raise CheckpointError(f"the adapter of {modules[0]} cannot be converted")
    rows = rows_of(layer, size, shape)
    if len(rows) == len(taken):
        return {part: pair for part, pair in zip(rows, taken, strict=True) if pair is not None}
    (pair,) = taken
    assert pair is not None, "the only one"
    _check_size(layer, pair, (size[0], size[1]))
    groups = size[0] // sum(rows.values())
    sizes = [groups * count for count in rows.values()]
    magnitudes = [None] * len(sizes) if pair.m is None else pair.m.split(sizes)
    return {
        part: Pair(pair.a, b, pair.scale, m)
        for part, b, m in zip(rows, pair.b.split(sizes), magnitudes, strict=True)
    }


def _take(left: dict[str, Tensor], module: str, config: JsonObject) -> Pair | None:
    # An expert's matrix of Mixtral has another name in the modules of newer `transformers`.
    *outer, last = module.replace(".block_sparse_moe.", ".mlp.").split(".")
    for name in (module, ".".join([*outer, _OF_MIXTRAL.get(last, last)])):
        for kind in ("lora_{}.weight", "lora_embedding_{}"):
            names = [f"{name}.{kind.format(matrix)}" for matrix in "AB"]
            if all(each in left for each in names):
                a, b = map(left.pop, names)
                m = left.pop(f"{name}.{_MAGNITUDE}", None)
                if (m is not None) != bool(config.get("use_dora")) or (
                    m is not None and "_emb" in kind
                ):
                    raise CheckpointError(
                        f"{name}: DoRA needs a {_MAGNITUDE} in each layer, and is not implemented "
                        "for embeddings"
                    )
                alpha = config.get("lora_alpha", 8)
                for pattern, value in (config.get("alpha_pattern") or {}).items():
                    if re.fullmatch(rf"(.*\.)?({pattern})", name):
                        alpha = value
                        break
                scale = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
                return Pair(a, b, scale, m)
    return None


def _entries(weights: Mapping[str, LazyTensor], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors; those of all experts of a layer as one of each expert.

    PEFT nests its wrappers: the tensor that it wraps first, that of gate and up projection, has
    ``base_layer`` in its name.
    """
    for name, tensor in weights.items():
        name = name.removeprefix(_PREFIX)
        if name.endswith(".base_layer.weight"):  # a copy of the base's embedding or output layer
            continue
        value = tensor.make()
        if (name.endswith(_MAGNITUDE) and value.dim() == 1) or ".lora_" not in name:
            yield name, value
            continue
        found = _STACK.fullmatch(name)
        base, is_inner, matrix = found.groups() if found else ("", None, "A")
        if value.dim() != 2 or (found and value.shape["AB".index(matrix)] % num_experts):
            raise CheckpointError(
                f"{name} has shape {list(value.shape)}: a matrix is needed, of experts with a "
                f"multiple of {num_experts} as ranks of all together"
            )
        if not found:
            yield name, value
            continue
        if matrix == "A":
            experts = value.unflatten(0, (num_experts, -1))
        else:
            experts = value.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
        parts = ("gate_proj", "up_proj") if is_inner else ("down_proj",)
        for number, entry in enumerate(experts):
            halves = entry.chunk(len(parts)) if matrix == "B" else [entry] * len(parts)
            for part, half in zip(parts, halves, strict=True):
                yield f"{base}.{number}.{part}.lora_{matrix}.weight", half
