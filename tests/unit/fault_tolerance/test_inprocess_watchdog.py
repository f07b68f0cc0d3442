"""Processes that restart inside stay alive when NCCL reports that another rank is lost."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron.training.fault_tolerance.inprocess import worker
from megatron.training.fault_tolerance.inprocess.coordinator import End
from megatron.training.fault_tolerance.inprocess.nvrx import WrapperAttempt

VARIABLES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")


def run_worker() -> None:
    control = mock.Mock()
    control.start.return_value = None
    control.end.return_value = End(0, "")
    control.is_stopped.return_value = False
    with mock.patch.object(worker, "Control", return_value=control):
        options: Any = SimpleNamespace()
        worker.Worker(0, options, "token", memoryview(bytearray(16)).cast("q")).run(mock.Mock())


def run_wrapper() -> None:
    WrapperAttempt(SimpleNamespace(iteration=0), None)


@pytest.mark.parametrize("run", [run_worker, run_wrapper])
def test_watchdogs_log_errors_unless_the_user_decides(run: Any) -> None:
    with mock.patch.dict(os.environ, {VARIABLES[1]: "1"}):
        os.environ.pop(VARIABLES[0], None)
        run()
        assert [os.environ[name] for name in VARIABLES] == ["0", "1"]
