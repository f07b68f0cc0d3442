"""A run without a training loop: a module with described parameters, an optimizer, a scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.parallel.process_groups_config import (
    ProcessGroupCollection,
    create_process_groups,
    make_grids,
)
from megatron.core.params.param_info import ParamInfo, info_of, set_info
from megatron.training.checkpointing.checkpoint_tensors import RunParts
from megatron.training.config.checkpoint import CheckpointConfig
from tests.support.tiny_checkpoint import global_tensors, info, shares


class Alone:
    """A process group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def groups_of_one() -> ProcessGroupCollection:
    dense, expert = make_grids(1)
    grids = ("dense_grid", "expert_grid")
    names = [f.name for f in fields(ProcessGroupCollection) if f.name not in grids]
    groups: dict[str, Any] = {name: Alone() for name in names}
    return ProcessGroupCollection(**groups, dense_grid=dense, expert_grid=expert)


class Model(nn.Module):
    """The parameters of `tiny`, this rank's share of each."""

    def __init__(self, tp: int = 1, rank: int = 0, seed: int = 0) -> None:
        super().__init__()
        for name, share in shares(global_tensors(seed), tp, rank).items():
            param = nn.Parameter(share)
            set_info(param, info(name, tp, rank))
            self.register_parameter(name.replace(".", "_"), param)
        self.register_buffer("counts", torch.zeros(3))


class Optimizer:
    """Keeps fp32 main parameters and one moment; its step depends on both and on the count."""

    def __init__(self, model: nn.Module) -> None:
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.state = [
            {"fp32_param": p.detach().clone().float(), "exp_avg": torch.zeros_like(p).float()}
            for p in self.params
        ]
        self.num_steps = 0
        self.is_sharded = False

    def step(self) -> None:
        self.num_steps += 1
        with torch.no_grad():
            for param, state in zip(self.params, self.state, strict=True):
                grad = state["fp32_param"].sin() * self.num_steps
                state["exp_avg"].mul_(0.9).add_(grad, alpha=0.1)
                state["fp32_param"].sub_(state["exp_avg"], alpha=0.01)
                param.copy_(state["fp32_param"])

    def named_state(
        self, *, every_main: bool = False
    ) -> Iterator[tuple[str, ParamInfo, dict[str, Tensor]]]:
        for param, state in zip(self.params, self.state, strict=True):
            yield info_of(param).name, info_of(param), state

    def scalar_state(self) -> dict[str, Any]:
        return {"step": self.num_steps}

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        self.num_steps = state["step"]

    def reload_model_params(self) -> None:
        for param, state in zip(self.params, self.state, strict=True):
            state["fp32_param"].copy_(param.detach())


class Scheduler:
    def __init__(self) -> None:
        self.num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps = state_dict["num_steps"]


def make_parts(
    groups: ProcessGroupCollection | None = None, *, seed: int = 0, dtype: torch.dtype | None = None
) -> RunParts:
    """A fresh run of this rank's layout."""
    groups = groups or groups_of_one()
    model = Model(groups.tp.size(), groups.tp.rank(), seed)
    if dtype is not None:
        for param in model.parameters():
            param.data = param.data.to(dtype)
    return RunParts(
        model_chunks=[model], groups=groups, optimizer=Optimizer(model), scheduler=Scheduler()
    )


def parts_of_layout(world_size: int, tp: int, seed: int = 0) -> RunParts:
    """This rank's.  Collective."""
    return make_parts(create_process_groups(*make_grids(world_size, tp=tp)), seed=seed)


def advance(parts: RunParts, num_steps: int) -> None:
    """Train a little."""
    for _ in range(num_steps):
        parts.optimizer.step()
        parts.scheduler.num_steps += 8
        parts.model_chunks[0].counts += 1


def values(parts: RunParts) -> dict[str, Tensor]:
    """Everything that counts, copied."""
    out = {name: t.detach().clone() for name, t in parts.model_chunks[0].state_dict().items()}
    for name, _, state in parts.optimizer.named_state():
        out |= {f"{kind} of {name}": tensor.clone() for kind, tensor in state.items()}
    out["steps"] = torch.tensor([parts.optimizer.num_steps, parts.scheduler.num_steps])
    return out


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def options(root: Any, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(**{"save": str(root), "load": str(root), **more})


def counters(iteration: int) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "consumed_train_samples": 8 * iteration,
        "num_floating_point_operations_so_far": 1e15 / 3 * iteration,
    }
