"""A language model whose output is one score per token, for reward models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.params.param_info import info_of, set_info
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


class RewardModel(GPTModel):
    """GPT with a linear layer of one output, ``score``, in place of the output layer.

    Every tensor-parallel rank computes the layer in full.
    """

    def build_output_layer(self, *, bias: bool = False) -> Any:
        """Build the layer, without an embedding's weight."""
        layer = ReplicatedLinear(
            self.config.hidden_size,
            1,
            config=self.config,
            init_method=self.config.init_method,
            bias=bias,
            has_partial_gradient=self.config.sequence_parallel,
        )
        set_info(layer.weight, replace(info_of(layer.weight), is_new=True))
        return layer

    def finalize_parameters(self, *stacks: str, rename: dict[str, str] | None = None) -> None:
        """Name and initialise the parameters; a checkpoint's output layer is of another shape."""
        super().finalize_parameters(
            *stacks, rename=(rename or {}) | {"output_layer.weight": "score.weight"}
        )

    def logits(self, hidden: Tensor, *, gather: bool) -> Tensor:
        """Raise ConfigError: there are no logits."""
        raise ConfigError("a reward model scores tokens and generates none: pass labels")

    def token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Map hidden states [s, b, h], or [s/tp, b, h], to the score of each token [b, s], float32.

        Labels are not read.  With sequence parallelism collective over the tensor-parallel group.
        """
        scores: Tensor = self.output_layer(hidden)
        if self.config.sequence_parallel:
            # Every rank computes the same loss from all scores: it keeps its part of the gradient.
            scores = gather_from_sequence_parallel_region(
                scores, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return scores.squeeze(-1).transpose(0, 1).float().contiguous()
