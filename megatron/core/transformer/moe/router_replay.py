"""Record the experts that routers choose, and replay them in a later pass.

Reinforcement learning generates with one engine and trains with another; replayed choices keep both
on the same experts.  The weights of the experts are always computed from the logits of the pass, so
that the router is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from megatron.core.transformer.moe.routing import best


class RouterReplayAction(Enum):
    """What a router does with the choices of a pass."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"  # in the recomputation of a pass, first to last micro-batch


class RouterReplay:
    """The recorded and the given choices [n, k] of one router of this process.

    A model whose config has ``moe_enable_routing_replay`` creates one for each router, in the order
    of its layers.
    """

    global_router_replay_instances: ClassVar[list[RouterReplay]] = []

    def __init__(self) -> None:
        self.router_replay_action: RouterReplayAction | None = None
        self.clear_indices()
        self.global_router_replay_instances.append(self)

    def clear_indices(self) -> None:
        """Forget recorded and given choices."""
        self.recorded_topk_idx: Tensor | None = None
        self.target_topk_idx: Tensor | None = None
        self.replay_backward_list: list[Tensor] = []

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Set the choices of the next forward pass, and of its recomputation."""
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def get_recorded_indices(self) -> Tensor | None:
        """Return the recorded choices."""
        return self.recorded_topk_idx

    def set_router_replay_action(self, router_replay_action: RouterReplayAction | None) -> None:
        """Set the action of this router; None: choose without recording."""
        self.router_replay_action = router_replay_action

    def choose(self, scores: Tensor, k: int, given: Tensor | None = None) -> Tensor:
        """Return the experts of each token, by the scores [n, E] or as given: [n, k].

        ``given`` [n, k]: choices that the caller passes; -1 for tokens without one.
        """
        action = self.router_replay_action
        if action is RouterReplayAction.REPLAY_FORWARD and self.target_topk_idx is not None:
            return self.target_topk_idx.to(scores.device)
        if action is RouterReplayAction.REPLAY_BACKWARD and self.replay_backward_list:
            return self.replay_backward_list.pop(0).to(scores.device)
        experts = best(scores, k)
        if given is not None:
            experts = torch.where(given >= 0, given.to(experts.dtype), experts)
        if action is RouterReplayAction.RECORD:
            self.recorded_topk_idx = experts
        return experts

    @classmethod
    def set_replay_data(cls, all_layers_topk_indices: Sequence[Tensor]) -> None:
        """Set the choices of all routers, in the order of their layers."""
        routers = cls.global_router_replay_instances
        if len(all_layers_topk_indices) != len(routers):
            raise ValueError(
                f"{len(all_layers_topk_indices)} tensors of choices for {len(routers)} routers: "
                "give one for each router of this process"
            )
        for router, indices in zip(routers, all_layers_topk_indices, strict=True):
            router.set_target_indices(indices)

    @classmethod
    def get_recorded_data(cls) -> list[Tensor | None]:
        """Return the recorded choices of all routers."""
        return [router.recorded_topk_idx for router in cls.global_router_replay_instances]

    @classmethod
    def clear_global_indices(cls) -> None:
        """Forget the choices of all routers."""
        for router in cls.global_router_replay_instances:
            router.clear_indices()

    @classmethod
    def set_global_router_replay_action(
        cls, router_replay_action: RouterReplayAction | None
    ) -> None:
        """Set the action of all routers; None: choose without recording."""
        for router in cls.global_router_replay_instances:
            router.router_replay_action = router_replay_action

    @classmethod
    def clear_global_router_replay_action(cls) -> None:
        """Let all routers choose without recording."""
        cls.set_global_router_replay_action(None)

    @classmethod
    def clear_global_router_replay_instances(cls) -> None:
        """Forget all routers, before another model is built."""
        cls.global_router_replay_instances.clear()
