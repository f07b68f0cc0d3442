"""From embeddings of an encoder to those of a language model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError
from megatron.core.parallel.default_groups import library_call
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.spec_utils import Slot, build_module, build_norm
from megatron.core.transformer.transformer_config import TransformerConfig


def pixel_shuffle(x: Tensor, scale_factor: float = 0.5, version: int = 2) -> Tensor:
    """Merge squares of embeddings into the channels of one: [b, n, c] -> [b, n/k^2, k^2 c].

    k is 1 / ``scale_factor``; the n embeddings of an image are a square, row by row.  Version 1
    leaves rows and columns exchanged, as the first InternVL models expect it.

    Raises ConfigError if the embeddings are no square of whole squares.
    """
    side, k = math.isqrt(x.shape[1]), round(1 / scale_factor)
    if side * side != x.shape[1] or side % k:
        raise ConfigError(
            f"{x.shape[1]} embeddings of an image cannot be merged {k} by {k}: a square of a "
            f"multiple of {k} rows is needed, without class tokens"
        )
    squares = x.unflatten(1, (side // k, k, side // k, k)).transpose(2, 3)
    if version == 1:
        squares = squares.transpose(1, 2)
    merged: Tensor = squares.flatten(3).flatten(1, 2)
    return merged


def average_pool(x: Tensor, count: int) -> Tensor:
    """Average squares of embeddings: [b, n, c] -> [b, ``count``, c]; see `pixel_shuffle`."""
    k = math.isqrt(x.shape[1] // count)
    pooled: Tensor = pixel_shuffle(x, 1 / k).unflatten(2, (k * k, -1)).mean(2)
    return pooled


TYPES = ("mlp", "affine")


@dataclass
class ProjectorSubmodules(MLPSubmodules):
    """Submodules of the projector: those of an MLP, and a norm of its input, if it has one.

    ``merges``: behind the norm of each, four embeddings become one by a matrix.
    """

    norm: Slot | None = None
    merges: bool = False


def get_projector_spec(*, has_norm: bool = False, merges: bool = False) -> ProjectorSubmodules:
    """Return a spec whose modules are plain PyTorch; InternVL's projector ``has_norm``."""
    norm = Norm if has_norm else None
    return ProjectorSubmodules(ColumnParallelLinear, RowParallelLinear, norm, merges)


class MultimodalProjector(MegatronModule):
    """An MLP ("mlp") or one linear layer ("affine") over the embeddings of an image.

    A norm precedes it if the submodules have one.  The output is ``config.hidden_size`` wide.
    """

    @library_call("... tp_group")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        projector_type: str,
        input_size: int,
        *,
        tp_group: ProcessGroup,
    ) -> None:
        """Build the projector.  Raises ConfigError for an unknown type and sequence parallelism."""
        super().__init__(config)
        if projector_type not in TYPES:
            raise ConfigError(
                f"vision projection {projector_type} is unknown; give one of {', '.join(TYPES)}"
            )
        if config.sequence_parallel:
            raise ConfigError(
                "every tensor-parallel rank has all embeddings of an image: build the projector "
                "from a config without --sequence-parallel"
            )
        self.projector_type = projector_type
        self.encoder: nn.Module
        self.merger: nn.Module | None = None
        if getattr(submodules, "merges", False):
            input_size //= 4
            bias = False
            self.merger = self._linear(submodules, 4 * input_size, input_size, tp_group, bias=bias)
        self.norm: Callable[[Tensor], Tensor] | None = None
        if (spec := getattr(submodules, "norm", None)) is not None:
            self.norm = build_norm(spec, config, input_size, has_partial_gradient=False)
        if projector_type == "mlp":
            self.encoder = MLP(config, submodules, tp_group=tp_group, input_size=input_size)
            return
        bias = config.add_bias_linear
        size = config.hidden_size
        self.encoder = self._linear(submodules, input_size, size, tp_group, bias=bias)

    def _linear(
        self, spec: MLPSubmodules, source: int, size: int, tp_group: ProcessGroup, *, bias: bool
    ) -> nn.Module:
        """Build a linear layer whose output every rank has completely."""
        layer: nn.Module = build_module(
            spec.linear_fc1,
            source,
            size,
            config=self.config,
            init_method=self.config.init_method,
            bias=bias,
            gather_output=True,
            offered={"tp_group": tp_group},
        )
        return layer

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Project: [.., input_size] -> [.., h].  Collective over the tensor-parallel group."""
        if self.merger is not None:
            hidden_states = hidden_states.unflatten(-1, (4, -1))
        if self.norm is not None:
            hidden_states = self.norm(hidden_states)
        if self.merger is not None:
            hidden_states, _ = self.merger(hidden_states.flatten(-2))
        projected: Tensor
        projected, bias = self.encoder(hidden_states)
        return projected if bias is None else projected + bias
