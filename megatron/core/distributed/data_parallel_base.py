"""Interface of data-parallel wrappers towards training loop, optimizer and pipeline schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.non_finite import GradientCheck
from megatron.core.parallel.process_groups_config import ProcessGroupCollection


class DataParallelBase(nn.Module, ABC):
    """Wrapper that sums gradients over micro-batches and reduces them over data-parallel ranks.

    ``config``: of the model; ``calculate_per_token_loss``, ``deterministic_mode`` and
    ``gradient_accumulation_fusion`` are read.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        ddp_config.check()  # fields may have been assigned since it was made
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self.groups = groups
        self.check = GradientCheck(
            for_nan=ddp_config.check_for_nan_in_grad, for_large=ddp_config.check_for_large_grads
        )

    def forward(self, *inputs: object, **kwargs: object) -> object:
        return self.module(*inputs, **kwargs)

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients without reducing them."""

    @abstractmethod
    def start_grad_sync(self, *_: object) -> None:
        """Start the reductions that have not started yet.  Collective over data-parallel ranks."""

    @abstractmethod
    def finish_grad_sync(self) -> None:
        """Wait until all gradients are reduced.  Collective over data-parallel ranks.

        Where the run checks for it, a gradient of this rank that is not finite is rejected.
        """

    @abstractmethod
    def zero_grad_buffer(self) -> None:
        """Begin a step: drop the gradients of the previous one."""

    @abstractmethod
    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all reduced gradients by ``scaling_factor``, in place."""

    @abstractmethod
    def reduced_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield each trainable parameter and its gradient, reduced by `finish_grad_sync`.

        The gradient of a sharded parameter is the part that this rank owns; a parameter of which
        this rank owns nothing may be left out.  None if the parameter received no gradient.
        """

    @abstractmethod
    def owned_parts(self) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Yield (parameter, start, stop): the elements that this rank's optimizer updates.

        The range counts elements of this rank's part of the parameter, flattened row by row; at
        most one range per parameter.  Only parameters whose update is divided over ranks have one.
        """

    @abstractmethod
    def start_param_sync(
        self, *_: object, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """All-gather the parameters, after this rank has updated the elements that it owns.

        Collective over data-parallel ranks.  While an all-gather is in progress, a call starts no
        other one.  ``force_sync``: wait until all parameters are gathered.  ``force_dispatch``: the
        elements have just been updated, so an all-gather in progress is an error.
        """

    def spans_by_rank(self) -> Iterator[tuple[nn.Parameter, list[tuple[int, int]]]]:
        """Yield each parameter whose update is divided, and the ranges that the ranks update.

        One range (start, stop) of elements per rank of those that share an optimizer, in rank
        order.  The result is the same on all of these ranks.
        """
        yield from ()

    def keep_values(self) -> None:
        """Never free the values of parameters, even if layers use 8-bit codes instead of them.

        Needed if an in-place update reads the old values, or if CUDA graphs have captured their
        addresses.
        """

    def prepare_param_update(self) -> None:
        """Allocate the values of parameters that are stored as 8-bit codes, before an update."""

    def finish_param_sync(self, *, values: bool = True) -> None:
        """Wait until all parameters are gathered.  Collective over data-parallel ranks.

        ``values``: also restore the values of parameters that are stored as 8-bit codes, for
        readers other than layers.
        """

    @abstractmethod
    def broadcast_params(self) -> None:
        """Broadcast each group's parameters from its first rank.  Collective over the group."""

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> ShardedStateDict:
        """Return the entries of the wrapped model, without the prefix ``module.``.

        Collective as `state_dict` is.
        """
        self.finish_param_sync()
        found: ShardedStateDict = self.module.sharded_state_dict(*args, **kwargs)  # type: ignore[operator]
        return found

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state_dict of the wrapped module, without a prefix of the wrapper.

        Collective over data-parallel ranks if parameters are still being gathered.
        """
        self.finish_param_sync()
        return self.module.state_dict(*args, **kwargs)

    state_dict_for_save_checkpoint = state_dict

    def load_state_dict(self, *args: Any, **kwargs: Any) -> object:
        """Load a state_dict into the wrapped module."""
        return self.module.load_state_dict(*args, **kwargs)
