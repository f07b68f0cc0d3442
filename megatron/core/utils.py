"""Helper functions that scripts import from Megatron Core."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup

from megatron.core.diagnostics.straggler import StragglerDetector as StragglerDetector
from megatron.core.parallel.context_parallel_partition import held_tokens, row_lengths
from megatron.core.parallel.default_groups import library_call
from megatron.core.rank_local import each_rank_owns

T = TypeVar("T")

_marks_ranges = False  # `configure_nvtx_profiling`
_ranges: list[tuple[str, record_function]] = []  # that have begun, innermost last
each_rank_owns(__name__, "_marks_ranges", "_ranges")


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise AssertionError unless ``denominator`` divides ``numerator``."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"


def divide(numerator: int, denominator: int) -> int:
    """Return ``numerator // denominator``.  Raises AssertionError if there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


class PaddedSize(int):
    """Padded size (an int) that also stores the size without padding.

    Scripts pass only ``args.padded_vocab_size`` to a model; the model reads ``true_size`` from it.
    """

    true_size: int

    def __new__(cls, padded_size: int, true_size: int) -> PaddedSize:
        size = super().__new__(cls, padded_size)
        size.true_size = true_size
        return size

    def __reduce__(self) -> tuple[type[PaddedSize], tuple[int, int]]:
        return type(self), (int(self), self.true_size)


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Call ``logger.log(*args)`` on ``rank`` only; ``args``: level, message, format arguments."""
    if not dist.is_initialized() or dist.get_rank() == rank:
        # The log handler drops records of ranks other than 0 without this mark.
        extra = {**kwargs.pop("extra", {}), "all_ranks": True}
        logger.log(*args, extra=extra, **kwargs)


def configure_nvtx_profiling(enabled: bool) -> None:
    """Let `nvtx_range_push` mark ranges, or ignore its calls, as it does by default."""
    global _marks_ranges
    _marks_ranges = enabled


def nvtx_range_push(msg: str | None = None, suffix: str | None = None) -> None:
    """Begin a range that profiles of PyTorch show, and with --profile those of Nsight Systems.

    ``msg`` defaults to the module and name of the caller; ``.suffix`` is appended.
    """
    if _marks_ranges:
        name = _range_name(msg, suffix)
        mark = record_function(name)
        mark.__enter__()
        _ranges.append((name, mark))


def nvtx_range_pop(msg: str | None = None, suffix: str | None = None) -> None:
    """End the range that began last.  Raises ValueError if ``msg`` and ``suffix`` name another."""
    if not _marks_ranges:
        return
    if not _ranges:
        raise ValueError("nvtx_range_pop: no range has begun; call nvtx_range_push first")
    name, mark = _ranges.pop()
    mark.__exit__(None, None, None)
    if msg is not None and name != _range_name(msg, suffix):
        raise ValueError(
            f"nvtx_range_pop: {_range_name(msg, suffix)} is not {name}, the last range"
        )


def nvtx_decorator(
    message: str | None = None, color: str | None = None
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that marks the calls of a function; without effect: ``color``."""
    del color

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        name = message or f"{function.__module__}.{function.__qualname__}"

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> T:
            if not _marks_ranges:
                return function(*args, **kwargs)
            with record_function(name):
                return function(*args, **kwargs)

        return marked

    return decorate


def _range_name(msg: str | None, suffix: str | None) -> str:
    if msg is None:
        caller = sys._getframe(2)
        msg = f"{caller.f_globals.get('__name__', '')}.{caller.f_code.co_name}"
    return msg if suffix is None else f"{msg}.{suffix}"


def get_attr_wrapped_model(
    model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False
) -> Any:
    """Return attribute ``attr`` of the outermost module that has it, from ``model`` inwards.

    Follows the ``module`` of wrappers.  ``return_model_obj``: return that module instead.  Without
    ``allow_none``, None counts as missing.  Raises RuntimeError if no module has the attribute.
    """
    if isinstance(model, list):
        raise RuntimeError("get_attr_wrapped_model takes one model chunk, not a list of them")
    while model is not None:
        value = getattr(model, attr, None)
        if value is not None or (allow_none and hasattr(model, attr)):
            return model if return_model_obj else value
        model = model._modules.get("module")
    raise RuntimeError(f"no module of this model has an attribute {attr!r}")


def get_model_config(model: nn.Module) -> Any:
    """Return the configuration of a model, which wrappers may enclose."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def deprecate_inference_params(inference_context: T | None, inference_params: T | None) -> T | None:
    """Return the context, or ``inference_params``, its former name, with a warning."""
    if inference_context is None and inference_params is not None:
        warnings.warn(
            "inference_params is now called inference_context", DeprecationWarning, stacklevel=3
        )
        return inference_params
    return inference_context


@library_call()
def get_batch_on_this_cp_rank(
    batch: Mapping[str, Tensor | None],
    cp_group: ProcessGroup,
    *,
    lengths: tuple[int, ...] | None = None,
) -> dict[str, Tensor | None]:
    """Return this context-parallel rank's tokens of a batch.

    Shapes: [b, s] -> [b, s/cp]; an attention mask [b, 1, s, s] -> [b, 1, s/cp, s].  ``lengths``:
    the lengths of sequences that are packed into a row (`PackedSeqParams.lengths`).  Raises
    ConfigError if a sequence cannot be split evenly.
    """
    cp = cp_group
    if cp.size() == 1:
        return dict(batch)

    def share(key: str, x: Tensor) -> Tensor:
        dim = 2 if key == "attention_mask" else 1
        held = held_tokens(row_lengths(lengths, x.shape[dim]), cp.rank(), cp.size(), x.device)
        return x.index_select(dim, held)

    return {key: None if x is None else share(key, x) for key, x in batch.items()}
