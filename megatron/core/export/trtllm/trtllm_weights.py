"""Weights of the ranks of TensorRT-LLM, by one function for complete weights and for shards.

Single-device export slices complete weights for all ranks; in distributed export each rank of a
run arranges its own shards.  `rank_tensors` does the work of both: TensorRT-LLM shards the same
rows and columns as Megatron Core.

``n`` query heads, ``g`` query groups, ``d`` head width, ``h`` hidden size, ``f`` width of the MLP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.export.trtllm.trtllm_layers import DataType, ExportConfig, TRTLLMLayers, numbered
from megatron.core.parallel.default_groups import default_groups
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

GATED = {"swiglu": "silu", "fast-swiglu": "silu", "geglu": "gelu"}  # -> the activation alone
_EMBEDDING = TRTLLMLayers.vocab_embedding.value
_OUTPUT = TRTLLMLayers.lm_head.value
_ON_FIRST = _EMBEDDING, TRTLLMLayers.position_embedding.value
_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.\d+(\..*)")
Names = Mapping[str, TRTLLMLayers]
Weights = dict[str, LazyTensor]


@dataclass(frozen=True)
class RankMapping:
    """Place of ``rank``: each of ``pp_size`` stages has ``tp_size`` ranks."""

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1

    @property
    def tp_rank(self) -> int:
        """Rank in its tensor-parallel group."""
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """Number of its stage."""
        return self.rank // self.tp_size


@dataclass(frozen=True)
class WeightLayout:
    """Sizes that determine how weights are arranged.  ``vocab_size`` is without padding."""

    config: TransformerConfig
    activation: str
    dtype: DataType
    vocab_size: int
    shards_embedding: bool
    is_falcon: bool = False

    @property
    def transformer_config(self) -> TransformerConfig:
        """Return the config, by the name of helpers; see `is_gated_activation`."""
        return self.config

    @property
    def groups(self) -> int:
        """Number of query groups."""
        return self.config.num_query_groups or self.config.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of an MLP or of an expert."""
        config = self.config
        of_expert = config.num_moe_experts and config.moe_ffn_hidden_size
        return int(of_expert or config.ffn_hidden_size)

    def check(self, tp_size: int, pp_size: int) -> None:
        """Raise ConfigError if the ranks cannot share the model evenly."""
        heads = self.config.num_attention_heads
        for what, number, size, axis in (
            ("attention heads", heads, tp_size, "tensor"),
            ("columns of the MLP", self.ffn_size, tp_size, "tensor"),
            ("query groups", max(self.groups, tp_size), min(self.groups, tp_size), "tensor"),
            ("layers", self.config.num_layers, pp_size, "pipeline"),
        ):
            if number % size:
                size = tp_size if axis == "tensor" else pp_size
                number = self.groups if what == "query groups" else number
                raise ConfigError(
                    f"{axis}-parallel size {size}: TensorRT-LLM cannot share {number} {what} evenly"
                )


def pad_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the rows of the output layer, a multiple of ``tp_size``."""
    return -(-vocab_size // tp_size) * tp_size


def str_dtype_to_torch(dtype: DataType) -> torch.dtype:
    """Return the dtype of torch."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def is_gated_activation(helper: Any) -> bool:
    """Return whether the MLP of a helper's model multiplies by a gate."""
    return helper.activation in GATED or bool(helper.transformer_config.gated_linear_unit)


class SingleDeviceTRTLLMModelWeightsConverter:
    """Slices complete weights for the ranks of inference."""

    def __init__(
        self,
        export_config: ExportConfig,
        transformer_config: TransformerConfig,
        dtype: DataType,
        multi_query_mode: bool = False,
        activation: str = "gelu",
        scales: None = None,
        *,
        is_falcon: bool = False,
    ) -> None:
        """``multi_query_mode`` is not read, and ``scales`` of fp8 are not supported."""
        self.export_config = export_config
        self.layout = WeightLayout(
            transformer_config,
            activation,
            dtype,
            0,
            export_config.use_parallel_embedding,
            is_falcon,
        )
        self.weights: Weights = {}

    def convert(
        self,
        model_state_dict: Mapping[str, Tensor | LazyTensor],
        trtllm_conversion_dict: Names,
        state_dict_split_by_layer_numbers: bool = True,
    ) -> None:
        """Read the weights of the complete model.

        ``state_dict_split_by_layer_numbers``: names have numbers of layers; else a tensor holds all
        layers.  Raises ConfigError for a weight that ``trtllm_conversion_dict`` lacks.
        """
        weights = as_lazy(model_state_dict)
        if not state_dict_split_by_layer_numbers:
            for name in [name for name in weights if ".layers." in name]:
                whole = weights.pop(name)
                for layer in range(whole.shape[0]):
                    each = name.replace(".layers.", f".layers.{layer}.", 1)
                    make = partial(_row, whole, layer)
                    weights[each] = replace(whole, shape=whole.shape[1:], make=make)
        self.weights = _renamed(weights, trtllm_conversion_dict)
        self.layout = replace(self.layout, vocab_size=self.weights[_EMBEDDING].shape[0])

    def get_padded_vocab_size(self) -> int:
        """Return the rows of the output layer over all ranks."""
        return pad_vocab_size(self.layout.vocab_size, self.export_config.inference_tp_size)

    def get_local_model_weights_per_gpu(
        self, mapping: Any, trtllm_model_config: object = None
    ) -> dict[str, Tensor]:
        """Return the weights of one rank: ``mapping`` is a `RankMapping`, or tensorrt_llm's."""
        return {t.name: t.make() for t in rank_tensors(self.weights, self.layout, mapping)}


class DistributedTRTLLMModelWeightsConverter:
    """Arranges the weights of this rank of a run that uses the groups of `parallel_state`."""

    def __init__(
        self,
        transformer_config: TransformerConfig,
        dtype: DataType,
        multi_query_mode: bool = False,
        activation: str = "gelu",
        scales: None = None,
        *,
        is_falcon: bool = False,
    ) -> None:
        """See `SingleDeviceTRTLLMModelWeightsConverter`."""
        groups = default_groups()
        self._group = groups.tp
        rank = groups.pp.rank() * groups.tp.size() + groups.tp.rank()
        self.mapping = RankMapping(rank, groups.tp.size(), groups.pp.size())
        self.layout = WeightLayout(transformer_config, activation, dtype, 0, True, is_falcon)
        self.trtllm_model_weights: dict[str, Tensor] = {}

    @torch.no_grad()
    def convert(
        self,
        model_state_dict: Mapping[str, Tensor],
        trtllm_conversion_dict: Names,
        tokenizer_vocab_size: int,
    ) -> None:
        """Arrange the state dict of this rank's model, with layers numbered in its stage.

        Collective over the tensor-parallel group, which gathers the vocabulary's weights: Megatron
        Core pads them to another size.
        """
        weights = _renamed(as_lazy(model_state_dict), trtllm_conversion_dict)
        for name in (_EMBEDDING, _OUTPUT):
            if name in weights:
                rows = weights[name].make().detach()
                whole = gather_from_sequence_parallel_region(rows, group=self._group)
                weights |= as_lazy({name: whole})
        self.layout = replace(self.layout, vocab_size=tokenizer_vocab_size)
        tensors = rank_tensors(weights, self.layout, self.mapping, are_shards=True)
        self.trtllm_model_weights = {tensor.name: tensor.make() for tensor in tensors}


def as_lazy(weights: Mapping[str, Any]) -> Weights:
    """Return lazy tensors, whether tensors or lazy ones are given, without extra states."""
    out = {}
    for name, x in weights.items():
        if isinstance(x, Tensor):
            out[name] = LazyTensor(name, x.dtype, tuple(x.shape), x.detach)
        elif isinstance(x, LazyTensor):
            out[name] = x
    return out


def _renamed(weights: Weights, names: Names) -> Weights:
    """Return weights by TensorRT-LLM's names; experts with a tensor each are stacked."""
    out: Weights = {}
    experts: dict[str, list[LazyTensor]] = {}
    for name, tensor in weights.items():
        if found := _EXPERT.fullmatch(name):
            experts.setdefault(f"{found[1]}experts{found[2]}", []).append(tensor)
        else:
            out[name] = tensor
    for name, parts in experts.items():
        shape = (len(parts), *parts[0].shape)
        out[name] = replace(parts[0], shape=shape, make=partial(_stacked, parts))
    return TRTLLMLayers.rename_input_layer_names_to_trtllm_layer_names(out, names)


def _row(tensor: LazyTensor, layer: int) -> Tensor:
    return tensor.make()[layer]


def _stacked(parts: list[LazyTensor]) -> Tensor:
    return torch.stack([part.make() for part in parts])


def rank_tensors(
    weights: Weights, layout: WeightLayout, place: RankMapping, *, are_shards: bool = False
) -> Iterator[LazyTensor]:
    """Yield the tensors of a rank.  Raises ConfigError if ranks cannot share the model evenly.

    ``weights``, by TensorRT-LLM's names, are complete, or with ``are_shards`` those of a stage's
    rank, with numbers of layers of the stage; embeddings and output layer are always complete.
    """
    layout.check(place.tp_size, place.pp_size)
    count = layout.config.num_layers // place.pp_size
    first = 0 if are_shards else place.pp_rank * count
    for name, tensor in weights.items():
        plain, number = TRTLLMLayers.return_layer_name_and_number(name)
        if number is None:
            is_here = place.pp_rank == (0 if plain in _ON_FIRST else place.pp_size - 1)
            arrange = partial(_outside, plain, layout, place)
        else:
            number -= first
            is_here = 0 <= number < count
            arrange = partial(_in_layer, plain.removesuffix(".expert"), layout, place, are_shards)
        if not is_here:
            continue
        for each, like in arrange(torch.empty(tensor.shape, device="meta")).items():
            dtype = str_dtype_to_torch(layout.dtype)
            make = partial(_made, tensor, arrange, each, dtype)
            yield LazyTensor(numbered(each, number), dtype, tuple(like.shape), make)


def _made(
    tensor: LazyTensor,
    arrange: Callable[[Tensor], dict[str, Tensor]],
    name: str,
    dtype: torch.dtype,
) -> Tensor:
    return arrange(tensor.make())[name].to(dtype).contiguous()


def _outside(name: str, layout: WeightLayout, place: RankMapping, x: Tensor) -> dict[str, Tensor]:
    """Arrange an embedding, the output layer or the last norm."""
    if name == TRTLLMLayers.final_layernorm_weight.value:
        return {name: _effective(x, layout)}
    if name in (_EMBEDDING, _OUTPUT):
        x = x[: layout.vocab_size]
    if name == _OUTPUT or (layout.shards_embedding and x.dim() > 1):
        x = F.pad(x, (0, 0, 0, -len(x) % place.tp_size)).chunk(place.tp_size)[place.tp_rank]
    return {name: x}


def _in_layer(
    name: str, layout: WeightLayout, place: RankMapping, is_shard: bool, x: Tensor
) -> dict[str, Tensor]:
    """Arrange a weight of a layer.

    A column layer has a part of the rows, a row layer a part of the columns; the bias of a row
    layer is complete, TensorRT-LLM adds it once.
    """
    part, parts = (0, 1) if is_shard else (place.tp_rank, place.tp_size)

    def share(tensor: Tensor, dim: int = 0) -> Tensor:
        return tensor.chunk(parts, dim)[part]

    if "layernorm." in name:
        x = _effective(x, layout) if name.endswith("weight") else x
        return {name.replace("post_", "mlp_") if layout.is_falcon else name: x}
    if ".qkv." in name:
        ranks = place.tp_size if is_shard else 1
        heads = layout.config.num_attention_heads // ranks
        return {name: _query_key_value(x, heads, max(layout.groups // ranks, 1), part, parts)}
    if ".fc." in name:
        has_experts = x.dim() > 2
        if not is_gated_activation(layout):
            return {name: share(x, int(has_experts))}
        gate, up = x.chunk(2, int(has_experts))
        if has_experts:  # the gate follows
            return {name: torch.cat([share(up, 1), share(gate, 1)], 1)}
        return {name: share(gate), name.replace(".fc.", ".gate."): share(up)}
    if name.endswith(("dense.weight", "proj.weight")):
        return {name: share(x, -1)}
    is_linear = name.endswith((".attention.weight", ".ffn.weight"))  # in place of a sublayer
    return {name: share(x) if is_linear else x}


def _effective(x: Tensor, layout: WeightLayout) -> Tensor:
    """Return the weight of a norm, which some models store minus 1."""
    return x.float() + 1 if layout.config.layernorm_zero_centered_gamma else x


def _query_key_value(x: Tensor, heads: int, groups: int, part: int, parts: int) -> Tensor:
    """Rearrange [g (n/g + 2) d, ..], in which groups alternate, to queries, keys, values.

    With fewer groups than ranks, several ranks have the keys and values of one group.
    """
    x = x.unflatten(0, (groups, heads // groups + 2, -1))
    query = x[:, :-2].flatten(0, 1)[part * heads // parts : (part + 1) * heads // parts]
    first = part * groups // parts
    own = x[first : first + max(groups // parts, 1)]
    return torch.cat([query, own[:, -2], own[:, -1]]).flatten(0, 1)
