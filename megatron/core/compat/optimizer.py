"""Megatron Core's optimizer classes that have another form here.

One `MegatronOptimizer` updates dense and expert parameters of all model chunks, on the device and
on the host.  Programs that train several models chain one optimizer for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.update_rules import UpdateRule

# Keys by which saved parameter groups are matched with this run's.
param_group_identifier_keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


class ProxyDict:
    """Entries of several dictionaries, by (index of the dictionary, key)."""

    def __init__(self, inner_dicts: Sequence[dict[Any, Any]]) -> None:
        self._inner_dicts = inner_dicts

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        return self._inner_dicts[key[0]].get(key[1])

    def __setitem__(self, key: tuple[int, Any], value: Any) -> None:
        self._inner_dicts[key[0]][key[1]] = value

    def __len__(self) -> int:
        return sum(map(len, self._inner_dicts))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return (key for key, _ in self.items())

    def items(self) -> Iterator[tuple[tuple[int, Any], Any]]:
        """Yield each key with its value."""
        for index, inner in enumerate(self._inner_dicts):
            yield from (((index, key), value) for key, value in inner.items())


class ChainedOptimizer(MegatronOptimizer):
    """Optimizers of different parameters that step together.

    A step is skipped by all of them or by none, and clips by the norm over all gradients.
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        self._chained = list(chained_optimizers)
        if self._chained:
            self.config = self._chained[0].config
        self.is_stub_optimizer = not self._chained
        chunks = [chunk for each in self._chained for chunk in each.model_chunks]
        self.model_chunks = list(dict.fromkeys(chunks))

    @property
    def chained_optimizers(self) -> list[MegatronOptimizer]:
        """The optimizers, in the order in which they update."""
        return self._chained

    @property
    def optimizer(self) -> UpdateRule:
        """The update rule of the only optimizer.  Raises AssertionError if there are several."""
        assert len(self._chained) == 1, (
            f"a chain of {len(self._chained)} optimizers has no single one: use chained_optimizers"
        )
        return self._chained[0].optimizer

    @property
    def param_groups(self) -> list[Any]:
        """Groups of main parameters of all optimizers."""
        return [group for each in self._chained for group in each.param_groups]

    @property
    def state(self) -> Any:
        """State by (index of the optimizer, main parameter)."""
        return ProxyDict([each.state for each in self._chained])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all optimizers."""
        for each in self._chained:
            each.zero_grad(set_to_none)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale."""
        return self._chained[0].scale_loss(loss) if self._chained else loss

    def get_loss_scale(self) -> Tensor:
        """Return the loss scale of the first optimizer."""
        return self._chained[0].get_loss_scale() if self._chained else torch.tensor(1.0)

    def step(self) -> tuple[bool, float | None, int | None]:
        """Update the parameters; return (whether updated, gradient norm, number of zeros)."""
        scales = [each.loss_scale for each in self._chained]
        squares = [
            each.squared_norm() / scale**2
            for each, scale in zip(self._chained, scales, strict=True)
        ]
        total = torch.stack(squares).sum() if squares else torch.zeros(())
        results = [
            each.step_by_norm(total * scale**2)
            for each, scale in zip(self._chained, scales, strict=True)
        ]
        if not all(updated for updated, _, _ in results):
            return False, None, None
        counts = [count for _, _, count in results if count is not None]
        return True, float(total.sqrt()), sum(counts) if counts else None

    def reload_model_params(self, state_dict: Mapping[str, Any] | None = None) -> None:
        """Copy model parameters to main parameters; see `MegatronOptimizer`."""
        if state_dict is not None and len(self._chained) > 1:
            raise ConfigError(
                "reload_model_params(state_dict=...): call it on each of chained_optimizers, with "
                "the state_dict of its model chunks"
            )
        for each in self._chained:
            each.reload_model_params(state_dict)

    def state_dict(self) -> Any:
        """Return the state of the only optimizer, or a list of the states of several."""
        states = [each.state_dict() for each in self._chained]
        return states[0] if len(states) == 1 else states

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> ShardedStateDict:
        """Return the entries of the only optimizer, or the entries of several by their index."""
        states = [each.sharded_state_dict(*args, **kwargs) for each in self._chained]
        return states[0] if len(states) == 1 else dict(enumerate(states))

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore the result of `state_dict`, or a dictionary index -> state."""
        if len(self._chained) == 1:
            state_dict = [state_dict]
        elif isinstance(state_dict, Mapping):
            state_dict = [state for _, state in sorted(state_dict.items())]
        if len(state_dict) != len(self._chained):
            raise CheckpointError(
                f"the checkpoint has the state of {len(state_dict)} optimizers, this run has "
                f"{len(self._chained)}"
            )
        for each, state in zip(self._chained, state_dict, strict=True):
            each.load_state_dict(state)


class HybridDeviceOptimizer:
    """Megatron Core's optimizer over GPU and CPU; here a setting of every optimizer."""

    def __init__(self, *_: object, **__: object) -> None:
        raise ConfigError(
            "HybridDeviceOptimizer(...): use get_megatron_optimizer with OptimizerConfig("
            "optimizer_cpu_offload=True, optimizer_offload_fraction=...)"
        )


class LayerWiseDistributedOptimizer:
    """Later versions' optimizer that gives each rank complete layers; here Muon needs none."""

    def __init__(self, *_: object, **__: object) -> None:
        raise ConfigError(
            "LayerWiseDistributedOptimizer(...): use get_megatron_optimizer with OptimizerConfig("
            "optimizer='muon', use_distributed_optimizer=True), which shards the state of matrices"
        )


def clip_qk(model: object, *_: object) -> float:
    """Refuse to clip query and key weights by their largest logits: no layer records these."""
    raise ConfigError("clip_qk(): QK clipping is not available; use qk_layernorm=True instead")
