"""Read formats ``torch_dcp`` and ``fsdp_dtensor``: a nested state dict in PyTorch's own files.

All values, including the command line, are saved by torch.distributed.checkpoint.  Optimizer state
is stored by parameter number as in format ``torch``, or by parameter name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject, Nested, StateDict, Unpickled
from megatron.core.dist_checkpointing.formats import (
    Format,
    RankReport,
    RankSave,
    check_written_once,
    merge_tensors,
)
from megatron.core.dist_checkpointing.manifest import (
    METADATA,
    RERUN_STATE,
    Common,
    FileEntry,
    PlaceEntry,
    TensorEntry,
    parsing,
)
from megatron.core.dist_checkpointing.mapping import split_rows
from megatron.core.dist_checkpointing.megatron_formats.dcp import (
    DcpFile,
    DcpIndex,
    DcpTensor,
    ForeignPiece,
    write_metadata,
)
from megatron.core.dist_checkpointing.megatron_formats.foreign_reader import (
    STATE_PREFIX,
    ForeignReader,
    check_args,
)
from megatron.core.dist_checkpointing.megatron_formats.names import (
    is_buffer,
    ordered_names,
    our_name,
    sharding_of,
    split_state,
)
from megatron.core.dist_checkpointing.megatron_formats.optimizer_order import (
    State,
    group_of,
    optimizer_state,
)
from megatron.core.dist_checkpointing.megatron_formats.reference_values import (
    grad_scaler,
    numbered_optimizer,
    param_groups,
    reference_rng,
    reference_values,
)

_MODEL, _OPTIMIZER = "model", "optimizer"
# Names of main parameters in the optimizer of --use-megatron-fsdp.
_MAIN = ("param", "master_param", "fp32_param")


class TorchDcpReader(ForeignReader):
    """Reader of a checkpoint in format torch_dcp or fsdp_dtensor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        index = DcpIndex(folder, self._map)
        with parsing(folder / METADATA):
            self._read_index(index)

    def _read_index(self, index: DcpIndex) -> None:
        """Set ``values`` and ``tensors`` from the index."""
        self.values = state = _nested(index)
        model = state.get(_MODEL)
        if not isinstance(model, Mapping):
            raise CheckpointError(
                f"{self.folder / METADATA} holds no model: it is no checkpoint of Megatron-LM "
                "in format torch_dcp or fsdp_dtensor"
            )
        check_args(self.args)
        params = [(name, tensor) for name, tensor in model.items() if isinstance(tensor, DcpTensor)]
        for name, tensor in params:
            self._place_whole("", name, tensor)
        trained = [param for param in params if not is_buffer(param[0])]
        for kind, name, tensor in self._optimizer_state(state.get(_OPTIMIZER), trained):
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

    def _rerun_state(self, rank: int) -> JsonObject | None:
        """Return what this program has saved; Megatron-LM saves that of one rank only."""
        text = self.values.get(RERUN_STATE)
        states = json.loads(text) if isinstance(text, str) else []
        return states[rank] if rank < len(states) else None

    def _optimizer_state(
        self, optimizer: object, params: list[tuple[str, DcpTensor]]
    ) -> Iterator[State]:
        if not isinstance(optimizer, Mapping):
            return
        inner = optimizer.get(_OPTIMIZER, optimizer)
        by_name = inner.get("state", {})
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
        half = name[-2:] in _HALVES and _HALVES.index(name[-2:])
        name = our_name(name if half is None else name[:-2])
        for chunk in tensor.chunks:
            first = chunk.offset[0] + (half or 0) * tensor.shape[0] if chunk.offset else 0
            offset = (first, *chunk.offset[1:]) if chunk.offset else ()
            self._add(prefix + name, tensor.dtype, ForeignPiece(offset, chunk.shape, chunk.array))


def _nested(index: DcpIndex) -> StateDict:
    """Rebuild the state dict that was flattened; tensors stay `DcpTensor` records."""
    root: StateDict = {}
    for key in (*index.tensors, *index.objects):
        steps = index.paths.get(key) or key.split(".", 1)
        path = [int(step) if str(step).isdecimal() else step for step in steps]
        at: Nested = root
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = index.tensors[key] if key in index.tensors else index.object(key)
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


_RNG = "rng_state"
_HALVES = ("_w", "_v")


@dataclass(frozen=True)
class _Stored:
    """Reference to a tensor that the ranks have written."""

    key: str


def write_rank_files(rank_save: RankSave, *, in_halves: bool = False) -> RankReport:
    """Write and fsync the file of one rank.  Not collective.  Raises OSError.

    ``in_halves``: write the halves of gated MLPs as two tensors, ``_w`` and ``_v``.
    """
    file = DcpFile(rank_save.folder, rank_save.rank, 0, rank_save.iteration)
    report = RankReport()
    for tensor in rank_save.tensors:
        has_halves = in_halves and sharding_of(
            split_state(tensor.key)[1], rank_save.arguments
        ).blocks == (1, 1)
        parts = iter([tensor])
        if has_halves:
            parts = split_rows(tensor, [tensor.global_shape[0] // 2] * 2)
        for suffix, part in zip(_HALVES if has_halves else ("",), parts, strict=True):
            report.tensors[tensor.key + suffix] = {
                "shape": list(part.global_shape),
                "dtype": str(part.dtype).removeprefix("torch."),
                "pieces": [file.add_box(p.data.to(part.dtype), p.offset) for p in part.pieces],
            }
    report.objects.update(rank_save.rank_state or {})
    report.files[file.name] = file.close()
    return report


def complete(
    folder: Path,
    reports: Sequence[RankReport],
    common: Common,
    *,
    state_dict: Callable[[Mapping[str, TensorEntry], Common], StateDict],
) -> dict[str, FileEntry]:
    """Write and fsync the values common to all ranks, and ``.metadata``."""
    stored = merge_tensors(report.tensors for report in reports)
    states = [report.objects[_RNG] for report in reports if _RNG in report.objects]
    for key, entry in stored.items():
        check_written_once(key, entry)
    state = state_dict(stored, common)
    if states:
        state[_RNG] = list(map(reference_rng, states))
    reruns = [report.objects.get(RERUN_STATE) for report in reports]
    if any(reruns):
        state[RERUN_STATE] = json.dumps(reruns)
    extra = DcpFile(folder, 0, 1, common["iteration"])
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, PlaceEntry] = {}
    paths: dict[str, tuple[object, ...]] = {}
    for name, path, leaf in _flattened(state):
        paths[name] = path
        if isinstance(leaf, _Stored):
            tensors[name] = stored[leaf.key]
        elif isinstance(leaf, Tensor):
            piece = extra.add_box(leaf, [0] * leaf.dim())
            dtype = str(leaf.dtype).removeprefix("torch.")
            tensors[name] = {"shape": list(leaf.shape), "dtype": dtype, "pieces": [piece]}
        else:
            objects[name] = extra.add(leaf)
    closed = extra.close()
    return {extra.name: closed, METADATA: write_metadata(folder, tensors, objects, paths=paths)}


def _by_name(stored: Mapping[str, TensorEntry], common: Common) -> StateDict:
    """Return the nested state dict of ``fsdp_dtensor``, with `_Stored` for the ranks' tensors."""
    arguments = common["args"]
    every = range(int(arguments.get("num_experts") or 0))
    weights = {name.removesuffix("_w").removesuffix("_v") for name in stored}
    names = [
        (local + suffix, name + suffix)
        for local, name in ordered_names(weights, arguments, experts=every)
        for suffix in ("", *_HALVES)
        if name and name + suffix in stored
    ]
    state = reference_values(common)
    state["model"] = {f"module.{local}": _Stored(name) for local, name in names}
    if common.get("optimizer") is None:
        return state
    step = torch.tensor(float(common["optimizer"]["step"]))
    groups = {
        (float(group["wd_mult"]), bool(group["is_decoupled_lr"])): group
        for group in param_groups(common, with_step=False)
    }
    of_param: dict[str, dict[str, Tensor | _Stored]] = {}
    meta: dict[str, StateDict] = {}
    for local, name in names:
        if is_buffer(name):
            continue
        inside = f"module.module.module.{local}"
        keys = {kind: f"{STATE_PREFIX}{kind}.{name}" for kind in _KINDS}
        found = {_KINDS[kind]: _Stored(key) for kind, key in keys.items() if key in stored}
        of_param[inside] = {"step": step, **found}
        meta[inside] = groups[group_of(name, len(stored[name]["shape"]), arguments)]
    inner = {"state": of_param, "param_to_group_meta": meta}
    state["optimizer"] = {**inner, **grad_scaler(common)}
    return state


_KINDS = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum_buffer",
    "fp32_param": "master_param",
}


def _numbered(stored: Mapping[str, TensorEntry], common: Common) -> StateDict:
    """Return the nested state dict of ``torch_dcp``, with `_Stored` for the ranks' tensors."""
    arguments = common["args"]
    every = range(int(arguments.get("num_experts") or 0))
    names = [pair for pair in ordered_names(stored, arguments, experts=every) if pair[1]]
    state = reference_values(common)
    state["model"] = {local: _Stored(name) for local, name in names}
    if common.get("optimizer") is None:
        return state
    shapes = [(name, len(stored[name]["shape"])) for _, name in names if not is_buffer(name)]
    kinds = {key.removeprefix(STATE_PREFIX).split(".")[0] for key in stored if split_state(key)[0]}
    state["optimizer"] = numbered_optimizer(
        common,
        shapes,
        kinds - {"fp32_param"},
        lambda kind, name: _Stored(f"{STATE_PREFIX}{kind}.{name}"),
    )
    return state


TORCH_DCP = Format(
    "torch_dcp", write_rank_files, partial(complete, state_dict=_numbered), is_foreign=True
)
FSDP_DTENSOR = Format(
    "fsdp_dtensor",
    partial(write_rank_files, in_halves=True),
    partial(complete, state_dict=_by_name),
    is_foreign=True,
)


def _flattened(
    tree: object, path: tuple[object, ...] = ()
) -> Iterator[tuple[str, tuple[object, ...], object]]:
    """Yield (key, path, leaf) as torch flattens: lists and tuples of plain values are leaves."""
    if isinstance(tree, Mapping):
        steps: list[tuple[object, object]] = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and any(isinstance(v, Mapping | list | _Stored) for v in tree):
        steps = list(enumerate(tree))
    else:
        yield ".".join(map(str, path)), path, tree
        return
    for step, value in steps:
        yield from _flattened(value, (*path, step))
