"""What the loop, the optimizer and the schedules ask of a data-parallel wrapper."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.parallel.process_groups_config import ProcessGroupCollection


class LossConfig(Protocol):
    """What a wrapper asks of a model's configuration."""

    @property
    def calculate_per_token_loss(self) -> bool: ...
    @property
    def deterministic_mode(self) -> bool: ...
    @property
    def gradient_accumulation_fusion(self) -> bool: ...


class DataParallelBase(nn.Module, ABC):
    """``module`` with gradients that are summed over micro-batches and averaged over replicas."""

    def __init__(
        self,
        config: LossConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self.groups = groups

    def forward(self, *inputs: object, **kwargs: object) -> object:
        return self.module(*inputs, **kwargs)

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only add to the gradients; more will follow."""

    @abstractmethod
    def start_grad_sync(self, *_: object) -> None:
        """Start the collectives not under way yet.  Collective over data-parallel ranks."""

    @abstractmethod
    def finish_grad_sync(self) -> None:
        """Wait until all gradients are reduced.  Collective over data-parallel ranks.

        Raises NonFiniteError when a gradient of this rank was not finite and the run checks.
        """

    @abstractmethod
    def zero_grad_buffer(self) -> None:
        """Begin a step: no gradients, nothing reduced."""

    @abstractmethod
    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients, after they were reduced."""

    @abstractmethod
    def reduced_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Where this rank has sums after `finish_grad_sync`, by trainable parameter.

        Of a sharded parameter it is the part that this rank owns; a parameter of which it owns
        nothing may be left out.  None for one that has had no gradient.
        """

    @abstractmethod
    def owned_parts(self) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Yield (parameter, start, stop): the elements that this rank's optimizer updates.

        The range is of this rank's part of the parameter, flattened row by row; at most one range
        per parameter.  Only parameters whose update is divided over ranks have one.
        """

    @abstractmethod
    def start_param_sync(self) -> None:
        """All-gather the parameters, after this rank has updated the elements that it owns.

        Collective over data-parallel ranks.
        """

    def spans_by_rank(self) -> Iterator[tuple[nn.Parameter, list[tuple[int, int]]]]:
        """Of parameters whose update is divided: elements start to stop that each rank updates.

        In the order of the ranks that share an optimizer; the same on all of them.
        """
        yield from ()

    def keep_values(self) -> None:
        """Keep the values of parameters beside codes: their addresses are recorded in a graph."""

    def prepare_param_update(self) -> None:
        """Give memory to parameters that are stored as codes: their values will be written."""

    def finish_param_sync(self, *, values: bool = True) -> None:
        """Wait until all parameters are gathered.  Collective over data-parallel ranks.

        ``values``: also of those that are stored as codes, for what reads them beside layers.
        """

    @abstractmethod
    def broadcast_params(self) -> None:
        """Take the parameters of each group's first rank.  Collective over data-parallel ranks."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's, without a prefix of the wrapper.  Collective while parameters come in."""
        self.finish_param_sync()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> object:
        """Load the module."""
        return self.module.load_state_dict(*args, **kwargs)
