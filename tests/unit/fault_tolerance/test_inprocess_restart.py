"""--inprocess-restart without nvidia-resiliency-ext, and with a stand-in for its wrapper.

The stand-in checks its arguments as version 0.4.1 does.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from megatron.core import optional
from megatron.core.diagnostics.fault_injection import ATTEMPT
from megatron.training import inprocess_restart
from megatron.training.config.resilience import ResilienceConfig

FLAGS = replace(ResilienceConfig(), inprocess_restart=True, inprocess_active_world_size=1)


def test_the_flag_is_refused_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTEMPT, raising=False)
    monkeypatch.setattr(optional, "why_missing", lambda package: "nvrx is not installed")
    assert list(inprocess_restart.problems()) == [
        '--inprocess-restart: nvrx is not installed; pip install "megatron-train[ft]", or omit the '
        "flag and start the run with tools/launch.py, which restarts it in new processes"
    ]


def test_the_flag_is_refused_in_a_process_without_a_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ATTEMPT, raising=False)
    monkeypatch.setattr(optional, "why_missing", lambda package: None)
    (problem,) = inprocess_restart.problems()
    assert "needs processes that torchrun or another launcher has started" in problem


def test_nothing_is_refused_inside_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT, "0")
    assert list(inprocess_restart.problems()) == []


class Part:
    """Base of NVIDIA's abstract classes: a callable that returns the state."""

    def __init__(self, *parts: Any, **kwargs: Any) -> None:
        self.parts = parts
        self.kwargs = kwargs

    def __call__(self, state: Any) -> Any:
        for part in reversed(self.parts):
            assert part(state) is state
        return state


class CallWrapper:
    """Passed to the function; ``iteration`` is the number of the attempt."""

    iteration = 0


class Wrapper:
    """Calls the function again after an Exception, with all parts in NVIDIA's order."""

    def __init__(self, *, store_kwargs: dict[str, Any], rank_assignment: Any, **kwargs: Any):
        parts = ("initialize", "abort", "finalize", "health_check")
        self.parts = {name: kwargs.pop(name) for name in parts}
        assert all(isinstance(time, timedelta) for time in kwargs.values())
        times = kwargs
        assert times["soft_timeout"] < times["hard_timeout"] < times["barrier_timeout"]
        assert times["monitor_process_interval"] < times["heartbeat_timeout"]
        assert times["heartbeat_interval"] < times["heartbeat_timeout"] < times["barrier_timeout"]
        assert times["monitor_thread_interval"] < times["soft_timeout"]
        assert times["progress_watchdog_interval"] < times["soft_timeout"]
        self.times = times
        self.layers = rank_assignment.parts[0]
        assert store_kwargs["port"] == 29502

    def __call__(self, function: Callable[..., None]) -> Callable[..., None]:
        (argument,) = (n for n, t in function.__annotations__.items() if t is CallWrapper)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            wrapper = CallWrapper()
            while True:
                self.parts["initialize"](self)
                try:
                    return function(*args, **{**kwargs, argument: wrapper})
                except Exception:
                    for name in ("abort", "finalize", "health_check"):
                        assert self.parts[name](self) is self
                    wrapper.iteration += 1

        return call


def stand_in() -> Any:
    package = types.SimpleNamespace
    reserve = types.SimpleNamespace(RESERVE="reserve")
    return package(
        CallWrapper=CallWrapper,
        Wrapper=Wrapper,
        Compose=Part,
        initialize=package(Initialize=Part, RetryController=Part),
        abort=package(Abort=Part, AbortTransformerEngine=Part, AbortTorchDistributed=Part),
        finalize=package(Finalize=Part),
        health_check=package(CudaHealthCheck=Part),
        rank_assignment=package(Layer=Part, LayerFlag=reserve, Tree=Part),
    )


@pytest.mark.parametrize(("granularity", "num_layers"), [("rank", 1), ("node", 2)])
def test_the_wrapper_gets_the_flags_and_calls_the_function_again(
    monkeypatch: pytest.MonkeyPatch, granularity: str, num_layers: int
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    monkeypatch.setattr(inprocess_restart, "_WRITING_S", 0)  # other tests leave such threads
    attempts = []

    def train(*, inprocess_call_wrapper: Any, store: object) -> None:
        assert store is None
        attempts.append(inprocess_call_wrapper.iteration)
        if len(attempts) < 3:
            raise RuntimeError("a fault")

    flags = replace(FLAGS, inprocess_granularity=granularity, inprocess_soft_timeout=7.0)
    wrapper: list[Wrapper] = []
    package = stand_in()
    package.Wrapper = lambda **kwargs: wrapper.append(Wrapper(**kwargs)) or wrapper[0]
    inprocess_restart._wrap(train, flags, package)(store=None)
    assert attempts == [0, 1, 2]
    assert len(wrapper[0].layers) == num_layers
    assert wrapper[0].times["soft_timeout"] == timedelta(seconds=7)
