"""Callbacks of a run: logs, profilers, saves, evaluation and exit conditions around each step.

User callbacks derive from `Callback`; `register_metric` adds values to the logs.
"""

from megatron.training.callbacks.user import register_metric as register_metric
from megatron.training.checkpointing.checkpointer import CheckpointEvent as CheckpointEvent
from megatron.training.runtime.context import StepResult as StepResult
from megatron.training.runtime.context import TrainState as TrainState
from megatron.training.step.run import Callback as Callback
from megatron.training.step.run import EvalResult as EvalResult
from megatron.training.step.run import PauseReason as PauseReason
from megatron.training.step.run import TrainingRun as TrainingRun
