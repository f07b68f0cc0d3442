"""From embeddings of an encoder to those of a language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError
from megatron.core.parallel import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.spec_utils import Slot, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

TYPES = ("mlp", "affine")


@dataclass
class ProjectorSubmodules(MLPSubmodules):
    """Submodules of the projector: those of an MLP, and a norm of its input, if it has one."""

    norm: Slot | None = None


def get_projector_spec(*, has_norm: bool = False) -> ProjectorSubmodules:
    """Return a spec whose modules are plain PyTorch; InternVL's projector ``has_norm``."""
    return ProjectorSubmodules(ColumnParallelLinear, RowParallelLinear, Norm if has_norm else None)


class MultimodalProjector(MegatronModule):
    """An MLP ("mlp") or one linear layer ("affine") over the embeddings of an image.

    A norm precedes it if the submodules have one.  The output is ``config.hidden_size`` wide.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        projector_type: str,
        input_size: int,
        *,
        tp_group: ProcessGroup | None = None,
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
        group = parallel_state.current().tp if tp_group is None else tp_group
        self.norm: Callable[[Tensor], Tensor] | None = None
        if isinstance(submodules, ProjectorSubmodules) and submodules.norm is not None:
            self.norm = build_module(
                submodules.norm,
                config=config,
                hidden_size=input_size,
                eps=config.layernorm_epsilon,
                has_partial_gradient=False,
            )
        if projector_type == "mlp":
            self.encoder = MLP(config, submodules, tp_group=group, input_size=input_size)
            return
        self.encoder = build_module(
            submodules.linear_fc1,
            input_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            bias=config.add_bias_linear,
            gather_output=True,
            offered={"tp_group": group},
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Project: [.., input_size] -> [.., h].  Collective over the tensor-parallel group."""
        if self.norm is not None:
            hidden_states = self.norm(hidden_states)
        projected: Tensor
        projected, bias = self.encoder(hidden_states)
        return projected if bias is None else projected + bias
