"""Read formats ``torch_dcp`` and ``fsdp_dtensor``: a nested state dict in PyTorch's own files.

All values, including the command line, are saved by torch.distributed.checkpoint.  Optimizer state
is stored by parameter number as in format ``torch``, or by parameter name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Nested, StateDict, Unpickled
from megatron.core.dist_checkpointing.manifest import METADATA, parsing
from megatron.core.dist_checkpointing.megatron_formats.dcp_index import (
    DcpIndex,
    DcpTensor,
)
from megatron.core.dist_checkpointing.megatron_formats.foreign_reader import (
    STATE_PREFIX,
    ForeignReader,
    check_args,
)
from megatron.core.dist_checkpointing.megatron_formats.names import (
    is_buffer,
    our_name,
    split_half,
)
from megatron.core.dist_checkpointing.megatron_formats.optimizer_order import (
    State,
    optimizer_state,
)

# Names of main parameters in the optimizer of --use-megatron-fsdp.
_MAIN = ("param", "master_param", "fp32_param")


class TorchDcpReader(ForeignReader):
    """Reader of a checkpoint in format torch_dcp or fsdp_dtensor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with parsing(folder / METADATA):
            self._read_index(DcpIndex(folder, self._map))

    def _read_index(self, index: DcpIndex) -> None:
        """Set ``values`` and ``tensors`` from the index."""
        self.values = state = _unflatten(index)
        model = state.get("model")
        if not isinstance(model, Mapping):
            raise CheckpointError(
                f"{self.folder / METADATA} holds no model: it is no checkpoint of Megatron-LM "
                "in format torch_dcp or fsdp_dtensor"
            )
        check_args(self.args)
        params = [(name, tensor) for name, tensor in model.items() if isinstance(tensor, DcpTensor)]
        for name, tensor in params:
            self._place_whole("", name, tensor)
        optimizer = state.get("optimizer")
        if isinstance(optimizer, Mapping):
            trained = [param for param in params if not is_buffer(param[0])]
            for kind, name, tensor in self._optimizer_state(optimizer, trained):
                self._place_whole(f"{STATE_PREFIX}{kind}.", name, tensor)
        self._finish()

    def _rng_state(self, rank: int) -> Unpickled | None:
        """Return the random states of ``rank``, or None.

        Megatron-LM saves only those of rank 0.  Its data-parallel peers use them too; ranks with
        another tensor- or pipeline-parallel rank have none.
        """
        states, world_size = self.values.get("rng_state"), self.manifest.layout["world_size"]
        if not states or rank >= world_size:
            return None
        if len(states) < world_size:
            at = self._coordinate(rank)
            if at["tp"] or at["pp"]:
                return None
            rank = 0
        return _with_arrays(states[rank])

    def _optimizer_state(
        self, optimizer: Unpickled, params: list[tuple[str, DcpTensor]]
    ) -> Iterator[State]:
        by_name = optimizer.get("optimizer", optimizer).get("state", {})
        if not any(isinstance(key, str) for key in by_name):
            what = f"{self.folder}: the optimizer's state"
            yield from optimizer_state(what, optimizer, None, [params], self.args, 0)
            return
        for name, kinds in by_name.items():
            for kind, tensor in kinds.items():
                if kind != "step" and isinstance(tensor, DcpTensor):
                    yield "fp32_param" if kind in _MAIN else kind, name, tensor

    def _place_whole(self, prefix: str, name: str, tensor: DcpTensor) -> None:
        while name.startswith("module."):
            name = name.removeprefix("module.")
        name, half = split_half(name)
        for chunk in tensor.chunks:
            if half:
                first, *others = chunk.offset
                chunk = replace(chunk, offset=(first + tensor.shape[0], *others))
            self._add(prefix + our_name(name), tensor.dtype, chunk)


def _unflatten(index: DcpIndex) -> StateDict:
    """Rebuild the state dict that was flattened; tensors stay `DcpTensor` records."""
    root: StateDict = {}
    for key in (*index.tensors, *index.objects):
        steps = index.paths.get(key) or key.split(".", 1)
        path = [int(step) if str(step).isdecimal() else step for step in steps]
        at: Nested = root
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = index.tensors[key] if key in index.tensors else index.load(key)
    for name in ("args", "iteration", "checkpoint_version", "opt_param_scheduler"):
        if isinstance(root.get(name), DcpTensor):
            root[name] = root[name].chunks[0].array()
    return {name: _dicts_to_lists(value, name) for name, value in root.items()}


def _dicts_to_lists(tree: Nested, name: object) -> Nested:
    """Convert dicts with integer keys, left by flattening, back to lists.

    The ``state`` of an optimizer stays a dict.
    """
    if not isinstance(tree, dict):
        return tree
    items = {key: _dicts_to_lists(value, key) for key, value in tree.items()}
    is_list = items and name != "state" and all(isinstance(key, int) for key in items)
    return [items[key] for key in sorted(items)] if is_list else items


def _with_arrays(tree: Nested) -> Nested:
    if isinstance(tree, DcpTensor):
        return tree.chunks[0].array()  # small, and written by one rank
    if isinstance(tree, Mapping):
        return {key: _with_arrays(value) for key, value in tree.items()}
    return tree
