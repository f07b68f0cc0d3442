"""Aggregate the steps of one log interval for the console line."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron.training.estimates.flops import causal_model_flops, num_floating_point_operations
from megatron.training.estimates.peak_flops import Peak
from megatron.training.runtime.state import StepResult
from megatron.training.step.run import TrainingRun


class Interval:
    """Sums over the steps of an interval; reads no value from the device before `fields`."""

    def __init__(self) -> None:
        self._last: StepResult | None = None
        self._num_steps = 0
        self._num_skipped = 0
        self._num_nan = 0
        self._num_tokens = 0
        self._flops = 0.0  # by Megatron-LM's formula
        self._causal_flops = 0.0
        self._losses = _Sums()  # of steps with an update
        self._losses_of_skipped = _Sums()

    def add(self, run: TrainingRun, result: StepResult) -> None:
        """Add one step."""
        self._last = result
        self._num_skipped += int(result.skipped)
        self._num_nan += int(result.nan)
        (self._losses_of_skipped if result.skipped else self._losses).add(result.losses)
        self._num_steps += 1
        self._num_tokens += result.num_tokens
        if run.config.logging.log_throughput:
            sizes = (run.config_of_work, result.batch_size, run.padded_vocab_size)
            self._flops += num_floating_point_operations(*sizes)
            self._causal_flops += causal_model_flops(*sizes).total

    def fields(
        self, run: TrainingRun, elapsed_s: float, joules: float | None, peak: Peak | None
    ) -> dict[str, float]:
        """Return label -> value, in the order of the console line.

        ``elapsed_s`` is the time of all steps, ``joules`` the energy of all ranks.  Losses are
        means over the steps with an update, or over the skipped steps if there is no other.
        """
        last = self._last
        assert last is not None, "an interval has at least one step"
        world_size = run.config.world_size
        losses = self._losses if self._num_steps > self._num_skipped else self._losses_of_skipped
        values: dict[str, float | None] = {
            "consumed samples": run.state.consumed_train_samples,
            "skipped samples": run.state.skipped_train_samples or None,
            "elapsed time per iteration (ms)": elapsed_s * 1000.0 / self._num_steps,
            "throughput per GPU (TFLOP/s/GPU)": None,
            "energy per GPU (J/iter/GPU)": None,
            "power per GPU (W/GPU)": None,
            "learning rate": last.learning_rate,
            "decoupled learning rate": last.decoupled_learning_rate,
            "global batch size": last.batch_size,
            **losses.means(),
            "loss scale": last.loss_scale,
            "grad norm": None if last.grad_norm is None else float(last.grad_norm),
            "num zeros": None if last.num_zeros is None else float(last.num_zeros),
            "params norm": last.params_norm,
            "number of skipped iterations": self._num_skipped,
            "number of nan iterations": self._num_nan,
        }
        if joules is not None:
            values["energy per GPU (J/iter/GPU)"] = joules / self._num_steps / world_size
            values["power per GPU (W/GPU)"] = joules / elapsed_s / world_size
        if run.config.logging.log_throughput:
            device_s = elapsed_s * world_size
            values["throughput per GPU (TFLOP/s/GPU)"] = self._flops / (device_s * 1e12)
            values["tokens/s"] = self._num_tokens / elapsed_s
            if peak is not None:
                values["MFU"] = 100.0 * self._causal_flops / (device_s * peak.flops_per_s)
        return {label: value for label, value in values.items() if value is not None}


class _Sums:
    """Sum and number of the values of each key."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, int]] = {}

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        for key, value in values.items():
            total, count = self._sums.get(key, (0.0, 0))
            self._sums[key] = (total + value, count + 1)

    def means(self) -> dict[str, float]:
        return {key: float(total) / count for key, (total, count) in self._sums.items()}
