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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Arguments, JsonObject
from megatron.core.dist_checkpointing.manifest import json_object
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor, write_file
from megatron.core.peft.lora import (
    ALL_LINEAR,
    WHOLE,
    LoraConfig,
    is_of_adapter,
    split_name,
    stack_rows,
)
from megatron.training.config.adapters import AdaptersConfig
from megatron.training.conversion.family import Family
from megatron.training.conversion.hf import SCORE
from megatron.training.conversion.hf_folder import read_safetensors
from megatron.training.conversion.lazy import as_lazy
from megatron.training.conversion.shape import ModelShape
from megatron.training.conversion.tensors import Rule, size_of, tensors_of

EMBEDDING = "embedding.word_embeddings"
_OUTPUT = "output_layer"
FLAGS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_use_rslora")


@dataclass(frozen=True)
class Pair:
    """A [r, i] and B [o, r] of one matrix; its weight grows by scale * B A."""

    a: Tensor
    b: Tensor
    scale: float


def lora_of(args: Arguments) -> LoraConfig:
    """Return the settings of the adapters that a checkpoint's command line describes."""
    given = {name: args[name] for name in FLAGS if args.get(name) is not None}
    given["lora_target_modules"] = tuple(given.get("lora_target_modules", (ALL_LINEAR,)))
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
        if len(delta) < len(weight):  # padding of the vocabulary
            delta = F.pad(delta, (0, 0, 0, len(weight) - len(delta)))
    else:
        columns = [deltas[part].t() if part in deltas else None for part in rows]
        like = next(each for each in columns if each is not None)
        delta = stack_rows(columns, tuple(rows.values()), like, groups).t()
    return (weight.float() + delta).to(weight.dtype)


def pairs_of(
    weights: Mapping[str, LazyTensor], config: LoraConfig, shape: ModelShape
) -> dict[str, dict[str, Pair]]:
    """Return the matrices of all adapters by layer and part, without padding of the vocabulary.

    An embedding has [r, v] and [h, r], as in PEFT.
    """
    found: dict[str, dict[str, Pair]] = {}
    for name in sorted(filter(is_of_adapter, weights)):
        layer, matrix, part = split_name(name)
        if matrix == "b":
            continue
        a = weights[name].make()
        b = weights[f"{name[:-1]}b"].make()
        a = a[: shape.vocab_size].t() if layer == EMBEDDING else a
        b = b[: shape.vocab_size] if layer == _OUTPUT else b
        found.setdefault(layer, {})[part] = Pair(a, b, config.scale)
    return found


def rows_of(layer: str, size: Sequence[int], shape: ModelShape) -> dict[str, int]:
    """Return the parts of a layer's weight of shape ``size``, with their rows in one group."""
    own = layer.rsplit(".", 1)[-1]
    if own == "linear_qkv":
        heads = shape.num_attention_heads // shape.num_query_groups
        return {"q": heads * shape.kv_channels, "k": shape.kv_channels, "v": shape.kv_channels}
    if own == "linear_fc1" and shape.is_gated:
        return {"gate": size[0] // 2, "up": size[0] // 2}
    return {WHOLE: size[0]}


CONFIG = "adapter_config.json"
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of adapters",
}
_TOO_LARGE = 1e6  # of ranks and scales
# Patterns for which Python's `re` could search for hours: repeated groups, and many repetitions.
_REPEATED_GROUP = re.compile(r"\)[*+?{]*[*+{]")
_MOST_REPETITIONS = 3
_MOST_LETTERS = 1000


def read_config(folder: Path) -> JsonObject:
    """Return adapter_config.json.  Raises CheckpointError for adapters of another kind."""
    try:
        config = json_object((folder / CONFIG).read_bytes(), str(folder / CONFIG))
    except OSError as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}") from None
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{folder / CONFIG} has peft_type {kind}: only LORA can be read")
    for name, words in _UNSUPPORTED.items():
        if config.get(name):
            raise CheckpointError(f"{folder / CONFIG} has {name}: {words} are not available")
    if not (_is_rank(config.get("r")) and _is_size(config.get("lora_alpha", 8))):
        raise CheckpointError(f"{folder / CONFIG} has no rank r or lora_alpha above 0")
    _check_patterns(folder, config.get("rank_pattern") or {}, _is_rank)
    _check_patterns(folder, config.get("alpha_pattern") or {}, _is_size)
    dropout = config.get("lora_dropout") or 0.0
    if not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
        raise CheckpointError(
            f"{folder / CONFIG} has lora_dropout {str(dropout)[:80]}: give a number from 0 to 1"
        )
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{folder / CONFIG} has bias {config['bias']}: train it with none")
    return config


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < _TOO_LARGE


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and _is_size(value)


def _check_patterns(folder: Path, patterns: object, is_valid: Callable[[object], bool]) -> None:
    """Raise CheckpointError unless ``patterns`` maps names or simple patterns to sizes."""
    if not isinstance(patterns, dict) or not all(map(is_valid, patterns.values())):
        raise CheckpointError(
            f"{folder / CONFIG} has a rank_pattern or alpha_pattern that is no table of names and "
            "numbers"
        )
    for pattern in patterns:
        if not _is_pattern(pattern):
            raise CheckpointError(
                f"{folder / CONFIG} has the pattern {pattern[:80]!r}: a name of modules is needed, "
                f"or a regular expression of at most {_MOST_REPETITIONS} repetitions, none of a "
                "group"
            )


def _is_pattern(pattern: str) -> bool:
    repetitions = sum(map(pattern.count, "*+{"))
    if repetitions > _MOST_REPETITIONS or _REPEATED_GROUP.search(pattern):
        return False
    try:
        return len(pattern) <= _MOST_LETTERS and bool(re.compile(pattern))
    except (re.error, OverflowError, RecursionError):
        return False


def scale_of(module: str, rank: int, config: JsonObject) -> float:
    """Return alpha / rank of a module; its alpha may be that of a pattern."""
    patterns = config.get("alpha_pattern") or {}
    alpha = config.get("lora_alpha", 8)
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = value
            break
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def rank_of(module: str, config: JsonObject) -> int:
    """Return the rank of a module, which may be that of a pattern."""
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return int(rank)
    return int(config["r"])


def _take_score(
    folder: Path, config: JsonObject, left: dict[str, Tensor], shape: ModelShape
) -> Tensor | None:
    """Remove the score of a reward model from ``left`` and return it.  Raises CheckpointError."""
    modules = config.get("modules_to_save") or []
    known = ("score", "classifier")  # PEFT lists both names of a classifier's head
    if not isinstance(modules, list) or not all(module in known for module in modules):
        raise CheckpointError(
            f"{folder / CONFIG} has modules_to_save {str(modules)[:80]}: the score of a reward "
            "model is the only complete module that can be read; train the adapters without others"
        )
    if not modules:
        return None
    score = left.pop(SCORE, None)
    if score is None:
        raise CheckpointError(
            f"{folder / CONFIG} has modules_to_save, and {WEIGHTS} no {SCORE}: get the folder again"
        )
    if list(score.shape) != [1, shape.dims["h"]]:
        raise CheckpointError(
            f"{folder / WEIGHTS} has a {SCORE} of shape {list(score.shape)}: only classifiers of "
            "one label, which are reward models, can be converted"
        )
    return score


WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
_INNER = "gate_up_proj"
_OUTER = "down_proj"  # tensors of all experts, by PEFT's nesting
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
        rule = _rule_of(layer, shape, family)
        transposed |= rule.transposed
        for theirs, pair in _their_pairs(layer, pairs, rule, shape):
            module = theirs.removesuffix(".weight")
            kind = "lora_embedding_{}" if layer == EMBEDDING else "lora_{}.weight"
            tensors[f"{_PREFIX}{module}.{kind.format('A')}"] = pair.a
            tensors[f"{_PREFIX}{module}.{kind.format('B')}"] = pair.b
            modules.add(_short(module))
            if len(pair.a) != config.rank:
                ranks[_short(module)] = len(pair.a)
    if shape.is_reward:
        tensors[f"{_PREFIX}{SCORE}"] = weights[SCORE].make()
    warning = _check_experts(tensors)
    alpha = config.alpha / config.rank
    written = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if shape.is_reward else "CAUSAL_LM",
        "modules_to_save": ["score"] if shape.is_reward else None,
        "base_model_name_or_path": base_name,
        "r": config.rank,
        "lora_alpha": _plain(config.alpha),
        "lora_dropout": 0.0,  # it is for training, and PEFT refuses it beside experts
        "use_rslora": config.use_rslora,
        "target_modules": sorted(modules),
        "rank_pattern": ranks,
        "alpha_pattern": {
            name: config.scale * (rank**0.5) if config.use_rslora else alpha * rank
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


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


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


def _rule_of(layer: str, shape: ModelShape, family: Family) -> Rule:
    rule = family.rule(f"{layer}.weight", shape)
    if rule.by_turns:
        raise CheckpointError(
            f"the rows of gate and up projection alternate in {family.architecture}: adapters of "
            f"{layer} cannot be converted"
        )
    return rule


def _their_pairs(
    layer: str, pairs: Mapping[str, Pair], rule: Rule, shape: ModelShape
) -> Iterator[tuple[str, Pair]]:
    """Yield their name of each matrix with its A and B."""
    if tuple(pairs) == (WHOLE,) and len(rule.theirs) == 1:
        yield rule.theirs[0], pairs[WHOLE]
        return
    parts = [part for part in ("q", "k", "v", "gate", "up") if part in rows_of(layer, (2,), shape)]
    if len(parts) == len(rule.theirs):
        for part, theirs in zip(parts, rule.theirs, strict=True):
            if part in pairs:
                yield theirs, pairs[part]
        return
    if len(rule.theirs) != 1 or set(pairs) != set(parts):
        raise CheckpointError(
            f"the adapter of {layer} has no counterpart in PEFT's files: theirs is "
            f"{', '.join(rule.theirs)}; train adapters of all of its parts"
        )
    every = [pairs[part] for part in parts]
    if all(torch.equal(pair.a, every[0].a) for pair in every):  # as read from such a file
        yield rule.theirs[0], Pair(every[0].a, torch.cat([p.b for p in every]), every[0].scale)
        return
    a = torch.cat([p.a for p in every])
    b = torch.block_diag(*[p.b for p in every])
    yield rule.theirs[0], Pair(a, b, every[0].scale)


def read_peft(
    folder: Path, shape: ModelShape, family: Family, dtype: torch.dtype
) -> tuple[dict[str, LazyTensor], dict[str, object]]:
    """Read a folder of PEFT; return our tensors and the flags of the adapters.

    Raises CheckpointError for adapters of another kind or of layers that the model has not.
    """
    config = read_config(folder)
    stored = read_safetensors(folder / WEIGHTS)
    left = dict(
        _without_stacks({name.removeprefix(_PREFIX): t for name, t in stored.items()}, config)
    )
    score = _take_score(folder, config, left, shape)
    sizes = {
        name.removesuffix(".weight"): size_of(letters, shape)
        for name, letters in tensors_of(shape).items()
        if name.endswith(".weight")
    }
    found: dict[str, dict[str, Pair]] = {}
    for layer in sizes:
        rule = family.rule(f"{layer}.weight", shape)
        if not all(name.endswith(".weight") or _EXPERT.search(name) for name in rule.theirs):
            continue
        if pairs := _our_pairs(layer, rule, left, config, shape):
            found[layer] = pairs
    if left:
        raise CheckpointError(
            f"{folder} has adapters of layers that are not in the model: "
            f"{', '.join(sorted(left)[:3])}"
        )
    every = [pair for pairs in found.values() for pair in pairs.values()]
    if not every:
        raise CheckpointError(f"{folder} holds no adapter")
    rank = max(len(pair.a) for pair in every)
    scale = every[0].scale
    values: dict[str, Tensor] = {} if score is None else {SCORE: score}
    for layer, pairs in _with_untrained(found, sizes, shape).items():
        for part, pair in pairs.items():
            _check_size(layer, part, pair, sizes[layer], shape)
            values |= _ours(layer, part, pair, rank, scale)
    targets = {
        f"{kind}.{_PART_NAMES[part]}" if part else f"{kind}.{own}".removeprefix(".")
        for kind, own, part in _kinds_of(found)
    }
    flags = {
        "lora_rank": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": config.get("lora_dropout") or 0.0,
        "lora_use_rslora": False,
        "lora_target_modules": sorted(targets),
        **({} if score is None else {"reward_model": True}),
    }
    return as_lazy({name: value.to(dtype).contiguous() for name, value in values.items()}), flags


def _with_untrained(
    found: dict[str, dict[str, Pair]], sizes: Mapping[str, tuple[int, ...]], shape: ModelShape
) -> dict[str, dict[str, Pair]]:
    """Add zeros for layers of the same kinds as those of ``found``, which has not all layers.

    With A and B zero their gradients are zero: they stay untrained, as in PEFT.
    """
    kinds = _kinds_of(found)
    out = {}
    for layer, size in sizes.items():
        parts = dict(found.get(layer, {}))
        if len(size) == 2:
            rows = rows_of(layer, size, shape)
            groups = size[0] // sum(rows.values())
            for part in rows:
                if part not in parts and (like := kinds.get((*_kind_of(layer), part))):
                    a = like.a.new_zeros(1, size[1])
                    b = like.b.new_zeros(groups * rows[part], 1)
                    parts[part] = Pair(a, b, like.scale)
        if parts:
            out[layer] = parts
    return out


def _check_size(
    layer: str, part: str, pair: Pair, size: tuple[int, ...], shape: ModelShape
) -> None:
    """Raise CheckpointError unless B A has the size of the matrix, a part of a layer's weight."""
    rows, columns = size
    if part:
        in_group = rows_of(layer, (rows, columns), shape)
        rows = rows // sum(in_group.values()) * in_group[part]
    size = (columns, rows) if layer == EMBEDDING else (rows, columns)
    found = len(pair.b), *pair.a.shape[1:]
    if found != size or pair.a.shape[:1] != pair.b.shape[1:]:
        raise CheckpointError(
            f"the adapter of {layer} has A {list(pair.a.shape)} and B {list(pair.b.shape)}, of a "
            f"matrix that is {list(size)}: it is of another model"
        )


def _kinds_of(found: Mapping[str, Mapping[str, Pair]]) -> dict[tuple[str, str, str], Pair]:
    """Return the module around a layer, the layer and its part -> an example."""
    return {
        (*_kind_of(layer), part): pair for layer, ps in found.items() for part, pair in ps.items()
    }


def _kind_of(layer: str) -> tuple[str, str]:
    *around, own = re.sub(r"\.local_experts\.\d+\.", ".", layer).split(".")
    return around[-1] if around else "", own


def _ours(
    layer: str, part: str, pair: Pair, rank: int, scale: float
) -> Iterator[tuple[str, Tensor]]:
    own = f"{layer}.lora.{part}_" if part else f"{layer}.lora."
    spare = rank - len(pair.a)
    a = F.pad(pair.a, (0, 0, 0, spare))
    b = F.pad(pair.b, (0, spare))
    b = b if pair.scale == scale else b * (pair.scale / scale)
    yield f"{own}a", a.t() if layer == EMBEDDING else a
    yield f"{own}b", b


def _our_pairs(
    layer: str, rule: Rule, left: dict[str, Tensor], config: JsonObject, shape: ModelShape
) -> dict[str, Pair]:
    """Remove the adapters of one of our layers from ``left`` and return them by part."""
    modules = [theirs.removesuffix(".weight") for theirs in rule.theirs]
    taken = [_take(left, module, config) for module in modules]
    if not any(taken):
        return {}
    if rule.by_turns:
        raise CheckpointError(f"the adapter of {modules[0]} cannot be converted")
    parts = list(rows_of(layer, (2,), shape))
    if len(parts) == len(taken):
        return {part: pair for part, pair in zip(parts, taken, strict=True) if pair is not None}
    (pair,) = taken
    assert pair is not None, "the only one"
    sizes = [shape.dims[letter] for letter in "qkk"] if parts[0] == "q" else [len(pair.b) // 2] * 2
    return {
        part: Pair(pair.a, b, pair.scale)
        for part, b in zip(parts, pair.b.split(sizes), strict=True)
    }


def _take(left: dict[str, Tensor], module: str, config: JsonObject) -> Pair | None:
    for name in (module, _new_name(module)):
        for kind in ("lora_{}.weight", "lora_embedding_{}"):
            names = [f"{name}.{kind.format(matrix)}" for matrix in "AB"]
            if all(each in left for each in names):
                a, b = (left.pop(each) for each in names)
                return Pair(a, b, scale_of(name, len(a), config))
    return None


def _new_name(module: str) -> str:
    """Return the name of an expert's matrix of Mixtral in the modules of newer `transformers`."""
    *outer, last = module.replace(".block_sparse_moe.", ".mlp.").split(".")
    return ".".join([*outer, _OF_MIXTRAL.get(last, last)])


def _without_stacks(
    weights: Mapping[str, LazyTensor], config: JsonObject
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors; those of all experts of a layer as one of each expert.

    PEFT nests its wrappers: the tensor that it wraps first has ``base_layer`` in its name.
    """
    for name, tensor in weights.items():
        if name.endswith(".base_layer.weight"):  # a copy of the base's embedding or output layer
            continue
        found = re.fullmatch(r"(.*\.experts)\.(base_layer\.)?lora_([AB])\.weight", name)
        if not found:
            yield name, tensor.make()
            continue
        base = found[1]
        matrix = found[3]
        theirs = _INNER if found[2] else _OUTER
        rank = rank_of(f"{base}.{theirs}", config)
        value = tensor.make()
        if value.dim() != 2 or value.shape["AB".index(matrix)] % rank:
            raise CheckpointError(f"{name} has shape {list(value.shape)}, no multiple of {rank}")
        if matrix == "A":
            entries = value.unflatten(0, (-1, rank))
        else:
            entries = value.unflatten(1, (rank, -1)).permute(2, 0, 1)
        for number, entry in enumerate(entries):
            yield from _of_expert(f"{base}.{number}", theirs, matrix, entry)


def _of_expert(base: str, theirs: str, matrix: str, entry: Tensor) -> Iterator[tuple[str, Tensor]]:
    if theirs == _OUTER:
        yield f"{base}.{theirs}.lora_{matrix}.weight", entry
        return
    halves = entry.chunk(2) if matrix == "B" else (entry, entry)
    for name, half in zip(("gate_proj", "up_proj"), halves, strict=True):
        yield f"{base}.{name}.lora_{matrix}.weight", half
