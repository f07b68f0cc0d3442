"""Loss scaling: multiply the loss so that small fp16 gradients do not underflow."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.config.errors import ConfigError


class GradScaler:
    """Loss scale that never changes (--loss-scale).

    ``scale`` multiplies the loss, and the optimizer divides gradients by it.
    """

    def __init__(self, scale: float) -> None:
        if scale <= 0.0:
            raise ConfigError(f"the loss scale {scale} must be positive, see --loss-scale")
        self.scale = scale

    def update(self, found_inf: bool) -> None:
        """Adapt the scale to whether the last step's gradients overflowed."""

    def state_dict(self) -> dict[str, float]:
        """Return the scale and its counters, for a checkpoint."""
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Restore the result of `state_dict`; the scale of the command line stays as it is."""


ConstantGradScaler = GradScaler  # Megatron-LM's name


class DynamicGradScaler(GradScaler):
    """Loss scale that doubles after ``growth_interval`` consecutive steps without overflow.

    The scale halves at overflow number ``hysteresis`` and at every further one; the count of
    overflows restarts when the scale doubles.
    """

    growth_factor = 2.0
    backoff_factor = 0.5

    def __init__(
        self, initial_scale: float, min_scale: float, growth_interval: int, hysteresis: int
    ) -> None:
        super().__init__(initial_scale)
        if not 0.0 < min_scale <= initial_scale:
            raise ConfigError(
                f"--min-loss-scale {min_scale} must lie between 0 and "
                f"--initial-loss-scale {initial_scale}"
            )
        if growth_interval < 1 or hysteresis < 1:
            raise ConfigError(
                f"--loss-scale-window {growth_interval} and --hysteresis {hysteresis} "
                f"must both be at least 1"
            )
        self.min_scale = min_scale
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self._good_steps = 0
        self._overflows_left = hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self._good_steps = 0
            self._overflows_left = self.hysteresis
            self.scale *= self.growth_factor

    def state_dict(self) -> dict[str, float]:
        return {
            "scale": self.scale,
            "growth_tracker": self._good_steps,
            "hysteresis_tracker": self._overflows_left,
        }

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        self.scale = float(state_dict["scale"])
        self._good_steps = int(state_dict["growth_tracker"])
        self._overflows_left = int(state_dict["hysteresis_tracker"])
