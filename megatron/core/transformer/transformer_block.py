"""The transformer layers of one pipeline stage, with recomputation, offloading and CUDA graphs.

Hidden states are [s, b, h], or [s/tp, b, h] under sequence parallelism.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, replace_prefix_for_sharding
from megatron.core.dist_checkpointing.module_state import sharded_state_dict_default
from megatron.core.packed_seq_params import AttentionMask
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.activation_offload import ActivationOffload, ModuleOffload
from megatron.core.transformer.config.attention import LINEAR_VARIANTS
from megatron.core.transformer.cuda_graphs import LayerGraphs
from megatron.core.transformer.heterogeneous.heterogeneous_config import layer_shapes
from megatron.core.transformer.hyper_connection import HyperConnection
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.layer_layout import layers_of_stage
from megatron.core.transformer.low_precision import quantize_layer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import Norm, Stream, norm_hidden, summed
from megatron.core.transformer.spec_utils import ModuleSpec, Slot, build_module, build_norm
from megatron.core.transformer.transformer_config import TransformerConfig

# Arguments of a layer and of a block in Megatron Core's order.
INPUTS = (
    "hidden_states attention_mask context context_mask rotary_pos_emb rotary_pos_cos "
    "rotary_pos_sin attention_bias inference_context packed_seq_params sequence_len_offset"
)
NOT_READ = "rotary_pos_cos rotary_pos_sin sequence_len_offset"


@dataclass
class TransformerBlockSubmodules:
    """Specs of all layers of the model (or of this stage), and of the final norm."""

    layer_specs: Sequence[Slot] | None = None
    layer_norm: Slot | None = None


class Span(NamedTuple):
    """Consecutive layers of a block that run as one unit."""

    start: int
    stop: int
    is_recomputed: bool  # full recomputation in backward


def cut_spans(spans: Iterable[Span], visited: Iterable[int]) -> Iterator[Span]:
    """Yield ``spans``, divided behind each layer of ``visited``."""
    for span in spans:
        inner = sorted(n + 1 for n in visited if span.start <= n < span.stop - 1)
        yield from (
            Span(first, stop, span.is_recomputed)
            for first, stop in pairwise([span.start, *inner, span.stop])
        )


def block_submodules(
    config: TransformerConfig, spec: TransformerBlockSubmodules | ModuleSpec
) -> TransformerBlockSubmodules:
    """Return the submodules that ``spec`` describes; the spec of one layer applies to all."""
    if isinstance(spec, ModuleSpec):
        if isinstance(spec.submodules, TransformerBlockSubmodules):
            return spec.submodules
        return TransformerBlockSubmodules([spec] * config.num_layers, Norm)
    if not hasattr(spec, "layer_specs"):
        raise TypeError(
            f"transformer_layer_spec is {spec}: pass a ModuleSpec, such as "
            "get_gpt_layer_local_spec() returns, or TransformerBlockSubmodules"
        )
    return spec


class TransformerBlock(MegatronModule):
    """The layers of one pipeline stage; on the last stage followed by the final norm."""

    # Megatron Core's offloading of activations; here `ActivationOffload` runs the layers.
    offload_context = nullcontext()
    group_prefetch_offload_commit_async: Callable[[Tensor], Tensor] | None = None

    @library_call("config spec post_layer_norm pre_process post_process model_comm_pgs vp_stage")
    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        *,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
        layer_indices: range | None = None,
    ) -> None:
        """Build the layers.  ``layer_indices`` overrides the stage's layers that the config gives.

        Raises ConfigError if the spec has another number of layers.
        """
        super().__init__(config)
        self.pre_process, self.post_process = pre_process, post_process
        self.post_layer_norm = post_layer_norm
        self.vp_stage = vp_stage
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        self.input_tensor: Tensor | None = None
        submodules = block_submodules(config, spec)
        specs = submodules.layer_specs or []
        if layer_indices is None:
            layer_indices = layers_of_stage(config, pg_collection.pp, vp_stage)
        self.layer_range = layer_indices
        if len(specs) == config.num_layers:
            specs = [specs[i] for i in layer_indices]
        if len(specs) != len(layer_indices):
            raise ConfigError(
                f"the spec describes {len(specs)} layers, --num-layers is {config.num_layers} "
                f"and this stage has {len(layer_indices)}"
            )
        self.submodules = TransformerBlockSubmodules(specs, submodules.layer_norm)
        self.final_layernorm: nn.Module | None = None
        self._build_layers()
        self.num_layers_per_pipeline_rank = len(self.layers)
        self.graphs: LayerGraphs | None = None
        if config.captures_layers and device.records_graphs():
            whole = config.graph_scope == "full"
            num_steps = config.cuda_graph_warmup_steps
            self.graphs = LayerGraphs(self.layers, num_steps, whole=whole)
        self.offload = _offload_of(config, self.layers)

        takers = [
            "defers_sum" in inspect.signature(type(layer).forward).parameters
            for layer in self.layers
        ]
        takers.append(self.final_layernorm is not None)
        size = config.mhc_recompute_layer_num or len(takers)
        self._defer_sums = [
            a and b and bool(i % size) for i, (a, b) in enumerate(pairwise(takers), start=1)
        ]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[tuple[int, int, int]] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the entries of `ShardedModule`; tensors of layers that are alike are stacked.

        They have one key for all layers, and a new first axis.
        """
        assert not sharded_offsets, "a stack of layers is not stacked itself"
        given = metadata or {}
        is_apart = given.get("non_homogeneous_layers") or given.get("singleton_local_shards")
        entries: ShardedStateDict = {}
        for name, child in self.named_children():
            if child is not self.layers:
                entries |= sharded_state_dict_default(child, f"{prefix}{name}.", (), metadata)
        for local, layer in enumerate(self.layers):
            number = self.layer_range[local]
            name = f"{prefix}layers.{local}."
            is_stacked = self.layers_are_alike and not is_apart
            place = [(0, number, self.config.num_layers)] if is_stacked else []
            of_layer = sharded_state_dict_default(layer, name, place, metadata)
            shared = f"{prefix}layers." if is_stacked else f"{prefix}layers.{number}."
            replace_prefix_for_sharding(of_layer, name, shared)
            entries |= of_layer
        return entries

    @property
    def layers_are_alike(self) -> bool:
        """Whether the config mixes no kinds of layers."""
        config = self.config
        is_mixed = config.experimental_attention_variant in LINEAR_VARIANTS
        is_mixed |= config.dsa_indexer_topk_freq > 1
        is_mixed |= bool(config.moe_num_hash_layers)
        return config.moe_layer_freq == 1 and layer_shapes(config) is None and not is_mixed

    def _build_layers(self) -> None:
        """Build the layers of ``submodules``, and the final norm.  A project may override it."""
        config = self.config
        groups = self.pg_collection
        start = self.layer_range.start
        offered = {
            "pg_collection": groups,
            "tp_group": groups.tp,
            "vp_stage": self.vp_stage,
            "pp_layer_offset": start,
        }
        self.layers = nn.ModuleList()
        for i, spec in enumerate(self.submodules.layer_specs or []):
            layer = build_module(spec, config=config, layer_number=i + 1, offered=offered)
            quantize_layer(layer, config, start + i, pg_collection=groups)
            self.layers.append(layer)
        norm = self.submodules.layer_norm
        self.hyper_head: HyperConnection | None = None
        if self.post_process and config.enable_mhc_connections:
            self.hyper_head = HyperConnection(config, only_reads=True)
        if self.post_process and self.post_layer_norm and norm is not None:
            self.final_layernorm = build_norm(norm, config, config.hidden_size)

    def _get_layer(self, layer_number: int) -> nn.Module:
        """Return the layer of this index in the stage, for projects."""
        return self.layers[layer_number]

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Set the previous stage's output; `forward` uses it in place of ``hidden_states``."""
        if isinstance(input_tensor, list):
            input_tensor = input_tensor[0]
        self.input_tensor = input_tensor

    @library_call(INPUTS, unused=NOT_READ)
    def forward(
        self,
        hidden_states: Any,
        attention_mask: AttentionMask | None = None,
        *,
        inference_context: KVCache | None = None,
        visit: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
        **more: object,
    ) -> Tensor:
        """Run the layers: [s, b, h] -> [s, b, h]; later stages ignore the argument.

        ``visit``: index of a layer of this stage -> function of the hidden states after it, which
        returns those that the next layer gets; without graphs and offloading.  ``more``: further
        arguments of `TransformerLayer.forward`.
        """
        if not self.pre_process:
            # Keep no reference, so that backward can free the tensor.
            hidden_states, self.input_tensor = self.input_tensor, None
        assert hidden_states is not None, "a later stage needs set_input_tensor"
        if not isinstance(hidden_states, Tensor):  # Megatron Core's WrappedTensor
            hidden_states = hidden_states.unwrap()
        shared: dict[str, object] = {
            "attention_mask": attention_mask,
            "inference_context": inference_context,
            "rotary_pos_emb": None,
            "attention_bias": None,
            "packed_seq_params": None,
            **more,
        }
        if self.config.dsa_indexer_topk_freq > 1:  # masks of this pass by layer
            shared["selections"] = {}
        if self.pre_process and self.config.enable_mhc_connections:
            hidden_states = hidden_states.repeat(1, 1, self.config.mhc_num_residual_streams)
        stream: Stream = hidden_states
        for span in self._spans() if visit is None else cut_spans(self._spans(), visit):
            stream = self._run_span(span, stream, shared)
            if visit is not None and span.stop - 1 in visit:
                stream = visit[span.stop - 1](summed(stream))
        if self.hyper_head is not None:
            (stream,) = self.hyper_head(summed(stream))
        if self.final_layernorm is None:
            return summed(stream)
        return norm_hidden(self.final_layernorm, stream)[1]

    def _spans(self) -> list[Span]:
        """Return the units in which the layers run; recomputed ones come first."""
        config, end = self.config, len(self.layers)
        covered, size = 0, config.recompute_num_layers or 1
        if config.recompute_granularity == "full" and self.training:
            covered = end
            if config.recompute_method == "block":
                covered, size = min(size, end), 1
        spans = [Span(i, min(i + size, covered), True) for i in range(0, covered, size)]
        if covered < end and (self.graphs is not None or self.offload is not None):
            # CUDA graphs and offloading handle all remaining layers together.
            return [*spans, Span(covered, end, False)]
        return [*spans, *(Span(i, i + 1, False) for i in range(covered, end))]

    def _run_span(self, span: Span, stream: Stream, shared: dict[str, object]) -> Stream:
        if not span.is_recomputed:
            return self._run(stream, shared, span.start, span.stop)
        with_gradient = {k: x for k, x in shared.items() if torch.is_tensor(x) and x.requires_grad}

        def chunk(x: Tensor, *rest: Tensor) -> Tensor:
            again = dict(zip(with_gradient, rest, strict=True))
            return summed(self._run(x, shared | again, span.start, span.stop))

        return checkpoint(
            chunk,
            self.config.distribute_saved_activations,
            summed(stream),
            *with_gradient.values(),
            tp_group=self.tp_group,
        )

    def _run(self, stream: Stream, shared: dict[str, object], start: int, stop: int) -> Stream:
        if self.graphs is not None and self.training:
            stream = summed(stream)
            recording = self.graphs.recording(stream, shared)
            if recording is not None:
                return recording.run(stream, shared)
        if self.offload is not None and self.training and torch.is_grad_enabled():
            return self.offload.run(self.layers, summed(stream), shared)
        # An index into a ModuleList costs as much as 20 layers that are skipped.
        for i, layer in enumerate(islice(self.layers, start, stop), start):
            # Hooks take tensors, and those of FSDP free the layer's bias before the sum.
            defers = self._defer_sums[i] and not layer._forward_hooks
            more = {"defers_sum": True} if defers else {}
            stream, _ = layer(stream, **shared, **more)
        return stream


def _offload_of(config: TransformerConfig, layers: nn.ModuleList) -> ActivationOffload | None:
    """Return what offloads activations; None without a flag or if device and host are one."""
    if not device.host_is_apart():
        return None
    if config.fine_grained_activation_offloading:
        return ModuleOffload(
            layers,
            config.offload_modules,
            config.activation_offload_fraction,
            config.min_offloaded_tensor_size,
        )
    if not config.cpu_offloading:
        return None
    return ActivationOffload(config.cpu_offloading_num_layers * config.cpu_offloading_activations)
