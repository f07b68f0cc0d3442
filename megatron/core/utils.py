"""Small helpers under the names that scripts import."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.diagnostics.straggler import StragglerDetector as StragglerDetector
from megatron.core.parallel import parallel_state
from megatron.core.parallel.context_parallel_partition import held_tokens, row_lengths


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise AssertionError unless ``denominator`` divides ``numerator``."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"


def divide(numerator: int, denominator: int) -> int:
    """``numerator // denominator``, which must leave no remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


class PaddedSize(int):
    """A size that remembers how much of it is not padding.

    Scripts hand ``args.padded_vocab_size`` to a model and nothing else; the model learns the true
    size from it.
    """

    true_size: int

    def __new__(cls, padded_size: int, true_size: int) -> PaddedSize:
        size = super().__new__(cls, padded_size)
        size.true_size = true_size
        return size

    def __reduce__(self) -> tuple[type[PaddedSize], tuple[int, int]]:
        return type(self), (int(self), self.true_size)


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """``logger.log(*args)`` on one rank: ``args`` are level, message and its values."""
    if not dist.is_initialized() or dist.get_rank() == rank:
        extra = {**kwargs.pop("extra", {}), "all_ranks": True}  # the handler lets it through
        logger.log(*args, extra=extra, **kwargs)


def get_attr_wrapped_model(
    model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False
) -> Any:
    """``model.attr`` of the outermost module that has it, below wrappers; or that module.

    Without ``allow_none`` a None does not count.  Raises RuntimeError when nobody has it.
    """
    assert not isinstance(model, list), "one model chunk, not a list of them"
    while model is not None:
        value = getattr(model, attr, None)
        if value is not None or (allow_none and hasattr(model, attr)):
            return model if return_model_obj else value
        model = model._modules.get("module")
    raise RuntimeError(f"no module of this model has an attribute {attr!r}")


def get_model_config(model: nn.Module) -> Any:
    """The config that a model was built from, below wrappers."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def get_batch_on_this_cp_rank(
    batch: Mapping[str, Tensor | None],
    cp_group: ProcessGroup | None = None,
    *,
    lengths: tuple[int, ...] | None = None,
) -> dict[str, Tensor | None]:
    """This rank's share of the tokens: [b, s] -> [b, s/cp], a mask [b, 1, s, s] -> [b, 1, s/cp, s].

    ``lengths`` are those of the sequences that are packed into a row, if several are: see
    `PackedSeqParams.lengths`.  Without a group it is the installed one.
    """
    cp = parallel_state.current().cp if cp_group is None else cp_group
    if cp.size() == 1:
        return dict(batch)

    def share(key: str, x: Tensor) -> Tensor:
        dim = 2 if key == "attention_mask" else 1
        held = held_tokens(row_lengths(lengths, x.shape[dim]), cp.rank(), cp.size(), x.device)
        return x.index_select(dim, held)

    return {key: None if x is None else share(key, x) for key, x in batch.items()}
