"""From embeddings of an encoder to those of a language model."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError
from megatron.core.parallel import parallel_state
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

TYPES = ("mlp", "affine")


class MultimodalProjector(MegatronModule):
    """An MLP ("mlp") or one linear layer ("affine") over the embeddings of an image.

    The width of its output is ``config.hidden_size``.
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
        projected: Tensor
        projected, bias = self.encoder(hidden_states)
        return projected if bias is None else projected + bias
