"""Low-rank adapters (LoRA, arXiv 2106.09685): y = W x + scale * B A x with a frozen W.

``r`` rank, ``i``/``o`` input and output width of the layer, ``x/tp`` this rank's share.

              A            B            collectives besides the layer's own
    column    [r, i]       [o/tp, r]    A x: all-gather with sequence parallelism (SP); backward
                                        reduces its gradient (all-reduce, with SP reduce-scatter)
    row       [r, i/tp]    [o, r]       none: B A x is added before the layer's own reduction
    embedding [v/tp, r]    [h, r]       none, as in row
    no shards [r, i]       [o, r]       none

Gradients that are partial sums on each tensor-parallel rank are all-reduced together with gradients
of sequence-parallel parameters: A in a column layer with SP, B in row layers and embeddings.
Layers of experts do not communicate: the gradient of A (column) or B (row) is partial over the
expert tensor-parallel ranks.

Hugging Face's models have separate matrices for queries, keys and values, and for gate and up
projection, each with an adapter of its own in the files of PEFT; here one layer stacks them.  Its
adapter therefore has an A and a B for each of these parts (``q_a``, ``q_b``, ...), of which any
subset may be trained; the outputs are stacked in the order of the layer's rows, which for q, k and
v is interleaved by query group.  Another layer has one ``a`` and one ``b``.

DoRA (arXiv 2402.09353) gives each part a magnitude m [o], sharded as the rows of B:
y = m / |W + scale * B A| * (W x + scale * B A x), with the norm of each row.  The norm has no
gradient, as in PEFT.  Row layers all-reduce its squares over the tensor-parallel ranks, in each
forward pass.

Targets name layers by Megatron-LM's names or by names of the PEFT library.  A layer has its global
module name (``decoder.layers.0.self_attention.linear_qkv``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError
from megatron.core.params.param_info import ParamInfo, info_of
from megatron.core.params.param_init import Init, new_parameter, param_info_for
from megatron.core.tensor_parallel.frozen_weight import FrozenWeight, StoredFormat, stored
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    Linear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.linear import LinearCall, linear
from megatron.core.tensor_parallel.mappings import (
    all_reduce,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import fork_for_tokens, fork_if

AdaptedLayer: TypeAlias = Linear | VocabParallelEmbedding
_INSIDE = ".lora."  # in the name of every parameter of an adapter
START = Init("zeros")  # one matrix is zero, so an untrained adapter adds nothing
ALL_LINEAR = "all-linear"
WHOLE = ""  # the part of a layer with one matrix
_OUTSIDE = ("word_embeddings", "output_layer")  # not part of all-linear, as in PEFT
# PEFT's name -> our layers and the part of each.
_OF_PEFT: Mapping[str, Mapping[str, str]] = {
    "q_proj": {"linear_qkv": "q", "linear_q_proj": WHOLE, "linear_q": WHOLE},
    "k_proj": {"linear_qkv": "k", "linear_kv": "k"},
    "v_proj": {"linear_qkv": "v", "linear_kv": "v"},
    "o_proj": {"linear_proj": WHOLE},
    "gate_proj": {"linear_fc1": "gate"},
    "up_proj": {"linear_fc1": "up"},
    "down_proj": {"linear_fc2": WHOLE},
    "w1": {"linear_fc1": "gate"},
    "w3": {"linear_fc1": "up"},
    "w2": {"linear_fc2": WHOLE},
    "q_a_proj": {"linear_q_down_proj": WHOLE},
    "q_b_proj": {"linear_q_up_proj": WHOLE},
    "kv_a_proj_with_mqa": {"linear_kv_down_proj": WHOLE},
    "kv_b_proj": {"linear_kv_up_proj": WHOLE},
    "embed_tokens": {"word_embeddings": WHOLE},
    "lm_head": {"output_layer": WHOLE},
}
# Module that can be trained and saved completely -> our name of it; names of PEFT and of this
# program.
SAVED_MODULES: Mapping[str, str] = {
    "lm_head": "output_layer",
    "embed_tokens": "word_embeddings",
    "norm": "final_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    **{
        own: own
        for own in "output_layer word_embeddings final_layernorm input_layernorm "
        "pre_mlp_layernorm".split()
    },
}
_EXPERT = re.compile(r"\.local_experts\.\d+\.")
_MODULES_OF_PEFT = {"self_attn": "self_attention", "model": "decoder"}
_EMBEDDING = "embedding.word_embeddings"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Settings of all adapters of a model."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...]
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: tuple[str, ...] = ()  # trained completely; see SAVED_MODULES

    def saves(self, name: str) -> bool:
        """Return whether the parameter of this global name is in one of ``modules_to_save``."""
        return name.split(".")[-2:-1] in [[SAVED_MODULES[each]] for each in self.modules_to_save]

    @property
    def scale(self) -> float:
        """Factor of the adapter's output: alpha / rank, or alpha / sqrt(rank) (rsLoRA)."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def attach_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Freeze ``model`` and add adapters to the layers that ``config.targets`` selects.

    Layers that loaded models do not have stay trainable, without adapters.  Parameters of adapters
    are new, with the device and dtype of the layer, and are initialized by `initialize_parameters`.
    No communication.
    """
    for param in model.parameters():
        info = info_of(param)
        param.requires_grad_(info.is_new or config.saves(info.name))
    for name, layer, adapter in make_adapters(model, config):
        if config.saves(f"{name}.weight"):
            raise ConfigError(
                f"--lora-modules-to-save and --lora-target-modules both name {name}: give one"
            )
        layer.lora = adapter


def make_adapters(
    model: nn.Module, config: LoraConfig
) -> Iterator[tuple[str, AdaptedLayer, LinearAdapter | EmbeddingAdapter]]:
    """Yield global name, layer and a new adapter of each layer that ``config.targets`` selects."""
    for name, module, parts in list(_layers(model)):
        selected = {p for target in config.targets for p in targeted_parts(target, name, parts)}
        chosen = [part for part in parts if part in selected]
        if chosen and isinstance(module, Linear):
            yield name, module, LinearAdapter(module, name, chosen, config)
        elif chosen:
            assert isinstance(module, VocabParallelEmbedding)
            yield name, module, EmbeddingAdapter(module, name, config)


def begin_magnitudes(chunks: Sequence[nn.Module]) -> bool:
    """Set the magnitudes of DoRA that were not loaded; the model must have its weights.

    Returns whether this rank has set any.  Collective over tp.
    """
    adapters = [m for chunk in chunks for m in chunk.modules() if isinstance(m, LinearAdapter)]
    return any([adapter.begin() for adapter in adapters if adapter.config.use_dora])


def names_in(model: nn.Module, targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the targets that select a layer of ``model``, and all names that would."""
    layers = [(name, parts) for name, _, parts in _layers(model)]
    matched = [t for t in targets if any(targeted_parts(t, *layer) for layer in layers)]
    return matched, sorted({name for layer in layers for name in names_of(*layer)})


def check_targets(
    targets: Sequence[str], found: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> None:
    """Raise ConfigError for targets that match no layer; ``found``: `names_in` of all stages."""
    matched = {target for each, _ in found for target in each}
    unknown = [target for target in targets if target not in matched]
    if unknown:
        names = {name for _, each in found for name in each}
        raise ConfigError(
            f"--lora-target-modules {' '.join(unknown)}: the model has no layer of this name; it "
            f"has {', '.join(sorted(names))}; {ALL_LINEAR} selects all but "
            f"{' and '.join(_OUTSIDE)}"
        )


def _layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLayer, tuple[str, ...]]]:
    """Yield global name, layer and parts of each layer that can have an adapter."""
    for name, module in model.named_modules():
        if not isinstance(module, Linear | VocabParallelEmbedding):
            continue
        if any(info_of(param).is_new for param in module.parameters(recurse=False)):
            continue
        if module.weight is not None:
            own = info_of(module.weight).name.removesuffix(".weight")
            # The output layer may have the weight of the embedding.
            is_tied = isinstance(module, ColumnParallelLinear) and own == _EMBEDDING
            name = name if is_tied else own or name
        yield name, module, tuple(rows_of_parts(module))


def is_of_adapter(name: str) -> bool:
    """Return whether the parameter of this global name belongs to an adapter."""
    return _INSIDE in name


def split_name(name: str) -> tuple[str, str, str]:
    """Split an adapter's parameter name into layer, matrix ("a", "b" or "m") and part.

    >>> split_name("decoder.layers.0.mlp.linear_fc1.lora.up_b")
    ('decoder.layers.0.mlp.linear_fc1', 'b', 'up')
    """
    module, _, own = name.partition(_INSIDE)
    part, _, matrix = own.rpartition("_")
    return module, matrix, part


def rows_of_parts(layer: nn.Module) -> dict[str, int]:
    """Return the parts of a layer, each with its rows in one group of interleaved rows.

    A layer with a single matrix has one part, with all rows of this rank.
    """
    if not isinstance(layer, Linear) or layer.weight is None:
        return {WHOLE: 0}
    info = info_of(layer.weight)
    rows = layer.weight.shape[0]
    if info.interleaved:
        return dict(zip("qkv"[-len(info.interleaved) :], info.interleaved, strict=True))
    if info.blocks == (1, 1):
        return {"gate": rows // 2, "up": rows // 2}
    return {WHOLE: rows}


def stack_rows(
    parts: Sequence[Tensor | None], rows: Sequence[int], like: Tensor, groups: int
) -> Tensor:
    """Stack outputs of parts along the last dimension as a layer orders its rows.

    ``parts``: [.., groups * rows[p]] each, or None for zeros; the rows of a group are adjacent in
    the result [.., groups * sum(rows)].  ``like`` gives dtype, device and leading dimensions.
    """
    split = [
        like.new_zeros((*like.shape[:-1], groups, count))
        if part is None
        else part.unflatten(-1, (groups, count))
        for part, count in zip(parts, rows, strict=True)
    ]
    return torch.cat(split, -1).flatten(-2)


class LinearAdapter(nn.Module):
    """Adapter of a linear layer; maps the layer's input on this rank to a term of its output.

    A's initial values are as in PEFT, uniform between +-1/sqrt(i); B is zero.
    """

    layer: Any  # a linear layer, whose weight DoRA reads

    def __init__(self, layer: Linear, name: str, parts: Sequence[str], config: LoraConfig) -> None:
        super().__init__()
        if getattr(layer, "engine", None) is not None:
            raise ConfigError(
                "--lora-rank: layers of Transformer Engine take no adapters; use "
                "--transformer-impl local"
            )
        self.config = config
        self.parts = tuple(parts)
        self.rows = rows_of_parts(layer)
        if layer.weight is None:  # the output layer of a tied embedding
            assert isinstance(layer, ColumnParallelLinear)
            tp = layer.tp_group
            shape = (layer.true_output_size, layer.input_size)
            info = param_info_for(shape, over=tp)
            dtype = layer.dtype
            num_rows = layer.output_size // tp.size()
            num_columns = layer.input_size
        else:
            info = info_of(layer.weight)
            dtype = layer.weight.dtype
            num_rows, num_columns = layer.weight.shape
        if config.use_dora and (layer.weight is None or info.is_expert):
            of = "the tied output layer" if layer.weight is None else "experts"
            raise ConfigError(
                f"--lora-use-dora: {of} take no DoRA ({name}); leave it out, or choose other "
                "--lora-target-modules"
            )
        vars(self)["layer"] = layer  # no child: the layer contains this module
        self.num_groups = num_rows // max(1, sum(self.rows.values()))
        self.group: ProcessGroup | None = None  # over which the gradient of A x is summed
        self.is_sequence_sharded = False  # A x is all-gathered over the group
        # Whether tensor-parallel ranks have different tokens, for dropout.
        self.forks_for_tokens = info.sequence_parallel
        self.is_row = isinstance(layer, RowParallelLinear)
        info_of_a = info_of_b = _plain(info)
        is_sharded = info.shard_count > 1
        columns = info.global_shape[1]
        if isinstance(layer, ColumnParallelLinear):
            self.group = layer.grad_group
            is_split = self.is_sequence_sharded = layer.sequence_parallel
            self.forks_for_tokens = is_split or (info.is_expert and not is_sharded)
            is_partial = is_sharded and (is_split or self.group is None)
            info_of_a = _unsharded(info, is_partial=is_partial)
        elif self.is_row:
            info_of_b = _unsharded(info, is_partial=is_sharded)
        rank = config.rank
        for part in self.parts:
            of_a = replace(
                info_of_a, global_shape=(rank, columns), init="uniform", init_std=columns**-0.5
            )
            rows = num_rows
            of_b = info_of_b
            if part != WHOLE:
                rows = self.rows[part] * self.num_groups
                of_b = replace(of_b, blocks=(1,), global_shape=(rows * of_b.shard_count, columns))
            of_b = replace(
                of_b, global_shape=(of_b.global_shape[0], rank), init=START.kind, init_std=START.std
            )
            made: list[tuple[str, tuple[int, ...], ParamInfo]]
            made = [("a", (rank, num_columns), of_a), ("b", (rows, rank), of_b)]
            if config.use_dora:
                of_m = replace(of_b, global_shape=of_b.global_shape[:1], init="zeros")
                made.append(("m", (rows,), of_m))
            for matrix, size, record in made:
                own = f"{part}_{matrix}" if part else matrix
                record = replace(record, name=f"{name}{_INSIDE}{own}")
                self.register_parameter(own, new_parameter(size, dtype, record))

    def matrices(self, matrix: str) -> list[Tensor]:
        """Return ``matrix`` ("a", "b" or "m") of each part."""
        return [self.get_parameter(f"{part}_{matrix}" if part else matrix) for part in self.parts]

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Compute the term of the output: [.., i] -> [.., o] of this rank.

        ``y``: W x, which DoRA needs.  Collectives as in the module.
        """
        a = self.matrices("a")
        given = x
        x = self._with_dropout(x)
        is_own = len(a) == 1
        narrow = linear(x, LinearCall(a[0] if is_own else torch.cat(a), is_own=is_own))
        if self.group is not None and self.is_sequence_sharded:
            narrow = gather_from_sequence_parallel_region(narrow, group=self.group)
        elif self.group is not None:
            narrow = copy_to_tensor_model_parallel_region(narrow, self.group)
        inputs = (narrow * self.config.scale).split(self.config.rank, -1)
        term = self._stacked(
            [linear(z, LinearCall(b)) for z, b in zip(inputs, self.matrices("b"), strict=True)]
        )
        if not self.config.use_dora:
            return term
        if x is not given:  # as in PEFT, dropout acts on the input of W too
            is_column = isinstance(self.layer, ColumnParallelLinear)
            call = LinearCall(self.layer.weight)
            if is_column:
                call = call._replace(group=self.group, sequence_parallel=self.is_sequence_sharded)
            y = linear(x, call, self.layer.quantizer)
        assert y is not None, "the layer passes W x"
        with torch.no_grad():
            weight = self.layer.base_weight() + self._product()
        excess = self._excess(weight)
        return excess * y + (1 + excess) * term

    def delta(self) -> Tensor:
        """Return what is added to this rank's weight: [o, i].  Collective over tp with DoRA."""
        product = self._product()
        if not self.config.use_dora:
            return product
        weight: Tensor = self.layer.base_weight() + product
        return self._excess(weight).unsqueeze(-1) * weight + product

    @torch.no_grad()
    def begin(self) -> bool:
        """Set magnitudes that have no values yet to the norms of the rows of W.

        Returns whether it did.  Collective over tp.
        """
        norms = self._norms(self.layer.base_weight())
        is_new = not any(bool(m.any()) for m in self.matrices("m"))
        for m, norm in zip(self.matrices("m"), norms, strict=True):
            if is_new:
                m.copy_(norm)
        return is_new

    def _product(self) -> Tensor:
        """Return scale * B A, in the shape of this rank's weight: [o, i]."""
        pairs = zip(self.matrices("b"), self.matrices("a"), strict=True)
        return self._stacked([(b @ a).t() * self.config.scale for b, a in pairs]).t()

    def _excess(self, weight: Tensor) -> Tensor:
        """Return m / |weight| - 1 of each row: [o]; 0 of parts without adapter."""
        pairs = zip(self.matrices("m"), self._norms(weight.detach()), strict=True)
        return self._stacked([(m.to(norm.dtype) / norm - 1).to(m.dtype) for m, norm in pairs])

    def _norms(self, weight: Tensor) -> list[Tensor]:
        """Return the norms of the rows of each part, at least in fp32."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        norms = torch.linalg.vector_norm(weight, dim=1, dtype=wide)
        if self.is_row and self.layer.tp_group.size() > 1:
            norms = all_reduce(norms.square(), self.layer.tp_group).sqrt()
        norms = norms.clamp_min(torch.finfo(wide).tiny)  # padding of the vocabulary
        if self.parts == (WHOLE,):
            return [norms]
        rows = norms.view(self.num_groups, -1).split(tuple(self.rows.values()), 1)
        by_part = dict(zip(self.rows, rows, strict=True))
        return [by_part[part].flatten() for part in self.parts]

    def _stacked(self, results: Sequence[Tensor]) -> Tensor:
        if self.parts == (WHOLE,):
            return results[0]
        by_part = dict(zip(self.parts, results, strict=True))
        every = [by_part.get(part) for part in self.rows]
        return stack_rows(every, tuple(self.rows.values()), results[0], self.num_groups)

    def _with_dropout(self, x: Tensor) -> Tensor:
        p = self.config.dropout
        if not self.training or p == 0:
            return x
        # Ranks with the same values drop the same of them, other ranks others.
        if self.is_row:
            stream = fork_if(True)
        else:
            stream = fork_for_tokens(True, is_sequence_sharded=self.forks_for_tokens)
        with stream:
            return F.dropout(x, p)


class EmbeddingAdapter(nn.Module):
    """Adapter of a word embedding: rows of A are looked up, B maps them to the hidden size.

    The initial values are as in PEFT: A zero, B normal.
    """

    def __init__(self, layer: VocabParallelEmbedding, name: str, config: LoraConfig) -> None:
        super().__init__()
        if config.use_dora:
            raise ConfigError(
                "--lora-use-dora: embeddings take no DoRA; leave word_embeddings out of "
                "--lora-target-modules"
            )
        self.config = config
        info = info_of(layer.weight)
        width = layer.weight.shape[1]
        a = replace(
            _plain(info),
            global_shape=(info.global_shape[0], config.rank),
            init=START.kind,
            init_std=START.std,
            name=f"{name}{_INSIDE}a",
        )
        b = replace(
            _unsharded(info, is_partial=info.shard_count > 1),
            global_shape=(width, config.rank),
            init="normal",
            init_std=1.0,
            name=f"{name}{_INSIDE}b",
        )
        self.a = new_parameter(
            (layer.num_embeddings_per_partition, config.rank), layer.weight.dtype, a
        )
        self.b = new_parameter((width, config.rank), layer.weight.dtype, b)

    def forward(self, ids: Tensor, y: Tensor | None = None) -> Tensor:
        """Look up ids of this rank's rows: [b, s] -> [b, s, h], without reduction over ranks."""
        return linear(F.embedding(ids, self.a) * self.config.scale, LinearCall(self.b))

    def delta(self) -> Tensor:
        """Return scale * A B^T, in the shape of this rank's weight: [v/tp, h]."""
        return self.a @ self.b.t() * self.config.scale


def _plain(info: ParamInfo) -> ParamInfo:
    """Return the sharding of ``info`` without the properties of the layer's weight alone."""
    return replace(
        info,
        interleaved=(),
        is_embedding_or_output=False,
        shared_over=None,
        is_duplicate=False,
        gathered_as_codes=False,
        part=None,
        dtype=None,
    )


def _unsharded(info: ParamInfo, *, is_partial: bool) -> ParamInfo:
    return replace(
        _plain(info),
        shard_dim=None,
        shard_index=0,
        shard_count=1,
        blocks=(1,),
        sequence_parallel=is_partial,
    )


def targeted_parts(target: str, module: str, parts: Sequence[str]) -> tuple[str, ...]:
    """Return the parts of layer ``module`` that ``target`` selects, of ``parts``.

    ``target`` is a name, or the end of a dotted name (``self_attention.linear_proj``), in which
    the experts of a layer have no numbers (``experts.linear_fc1``).
    """
    *inside, last = target.split(".")
    *around, own = _EXPERT.sub(".", module).split(".")
    if target == ALL_LINEAR:
        return () if own in _OUTSIDE else tuple(parts)
    wanted = [_MODULES_OF_PEFT.get(each, each) for each in inside]
    if wanted and around[-len(wanted) :] != wanted:
        return ()
    if last == own:
        return tuple(parts)
    part = _OF_PEFT.get(last, {}).get(own)
    if part is None:
        return ()
    if part == "up" and WHOLE in parts:  # an MLP without a gate
        part = WHOLE
    return (part,) if part in parts else ()


def names_of(module: str, parts: Sequence[str]) -> set[str]:
    """Return the names that select layer ``module`` or one of its parts."""
    own = module.rsplit(".", 1)[-1]
    theirs = (name for name in _OF_PEFT if targeted_parts(name, module, parts))
    return {own, *theirs}


def stored_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the codes and scales of the stored weights of ``model``."""
    for layer in model.modules():
        if isinstance(layer, Linear) and isinstance(layer.quantizer, FrozenWeight):
            held = vars(layer.quantizer.weight).values()
            yield from (tensor for tensor in held if isinstance(tensor, Tensor))


@torch.no_grad()
def store_base(chunks: Sequence[nn.Module], format: StoredFormat) -> None:
    """Store the weights of all linear layers but the output layer in ``format``.

    The parameters keep their shapes and records, and no memory: their values are lost, so the base
    must have been loaded and named before.  Collective over the ranks that shard a weight.  Raises
    ConfigError for a weight that the format cannot hold.
    """
    for chunk in chunks:
        for name, layer in chunk.named_modules():
            weight = layer.weight if isinstance(layer, Linear) else None
            if weight is None or name.endswith("output_layer"):
                continue
            group = getattr(layer, "tp_group", None)
            try:
                layer.quantizer = FrozenWeight(stored(weight, format, group))
            except ValueError as error:
                raise ConfigError(
                    f"--lora-base-dtype {format}: {info_of(weight).name}: {error}; use fp8 or int8"
                ) from None
            weight.data = weight.new_zeros(()).expand(weight.shape)
