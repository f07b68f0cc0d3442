"""Callbacks of a run: logs, profilers, saves, evaluation and exit conditions around each step.

User callbacks derive from `Callback`; `register_metric` adds values to the logs.
"""

from megatron.training.callbacks.user_metrics import register_metric as register_metric
from megatron.training.runtime.runtime import Callback as Callback
from megatron.training.runtime.runtime import CheckpointEvent as CheckpointEvent
from megatron.training.runtime.runtime import EvalResult as EvalResult
from megatron.training.runtime.runtime import PauseReason as PauseReason
from megatron.training.runtime.runtime import Runtime as Runtime
from megatron.training.runtime.state import StepResult as StepResult
from megatron.training.runtime.state import TrainState as TrainState
