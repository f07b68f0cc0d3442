"""Writes format ``torch_dcp``: the state dict of format torch, flattened into PyTorch's own files.

Shares are put together by whoever loads: a tensor has its whole shape, whatever layout wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.foreign.dcp_index import METADATA
from megatron.core.dist_checkpointing.foreign.dcp_writer import DcpFile, write_metadata
from megatron.core.dist_checkpointing.foreign.foreign_reader import STATE_PREFIX
from megatron.core.dist_checkpointing.foreign.model_order import ordered_names
from megatron.core.dist_checkpointing.foreign.names import is_buffer, split_state
from megatron.core.dist_checkpointing.foreign.optimizer_order import numbered_groups
from megatron.core.dist_checkpointing.foreign.reference_values import (
    grad_scaler,
    is_half,
    param_groups,
    reference_rng,
    reference_values,
)
from megatron.core.dist_checkpointing.format import Format, RankReport, check_written_once
from megatron.core.dist_checkpointing.manifest import FileEntry
from megatron.core.dist_checkpointing.mapping import ShardedTensor

_RNG = "rng_state"


@dataclass(frozen=True)
class _Stored:
    """A tensor that the ranks have written."""

    key: str


def write_rank_files(
    folder: Path,
    rank: int,
    tensors: Sequence[ShardedTensor],
    rank_state: Mapping[str, Any] | None,
    *,
    iteration: int,
    attempt: str,
    asked: Mapping[str, Any],
) -> RankReport:
    """Write and fsync the file of one rank.  Local.  Raises OSError."""
    del attempt, asked
    file = DcpFile(folder, rank, 0, iteration)
    report = RankReport(tensors={}, files={})
    for tensor in tensors:
        pieces = [
            {**file.add(p.data.to(tensor.dtype)), "offset": list(p.offset), "shape": list(p.shape)}
            for p in tensor.pieces
        ]
        report.tensors[tensor.key] = {
            "shape": list(tensor.global_shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "pieces": pieces,
        }
    if rank_state is not None and rank == 0:
        report.tensors[_RNG] = dict(rank_state[_RNG])
    report.files[file.name] = asdict(file.close())
    return report


def complete(
    folder: Path, reports: Sequence[RankReport], common: Mapping[str, Any]
) -> dict[str, FileEntry]:
    """Write and fsync what is one for all ranks, and ``.metadata``."""
    stored: dict[str, dict[str, Any]] = {}
    rng = reports[0].tensors.pop(_RNG, None)
    for report in reports:
        for key, entry in report.tensors.items():
            stored.setdefault(key, {**entry, "pieces": []})["pieces"] += entry["pieces"]
    for key, entry in stored.items():
        check_written_once(key, entry)
    state = _state_dict(stored, common)
    if rng is not None:
        state[_RNG] = [reference_rng(rng)]
    extra = DcpFile(folder, 0, 1, common["iteration"])
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    paths = dict(_flattened(state))
    for name, (path, leaf) in paths.items():
        del path
        if isinstance(leaf, _Stored):
            tensors[name] = stored[leaf.key]
        elif isinstance(leaf, Tensor):
            shape = list(leaf.shape)
            piece = {**extra.add(leaf), "offset": [0] * len(shape), "shape": shape}
            dtype = str(leaf.dtype).removeprefix("torch.")
            tensors[name] = {"shape": shape, "dtype": dtype, "pieces": [piece]}
        else:
            objects[name] = extra.add(leaf)
    closed = extra.close()
    where = {name: path for name, (path, _) in paths.items()}
    return {extra.name: closed, METADATA: write_metadata(folder, tensors, objects, paths=where)}


TORCH_DCP = Format("torch_dcp", write_rank_files, complete, is_foreign=True)


def _state_dict(stored: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """The nested state dict, with `_Stored` for tensors of the ranks."""
    asked = common["args"]
    every = range(int(asked.get("num_experts") or 0))
    names = [pair for pair in ordered_names(stored, asked, experts=every) if pair[1]]
    state = reference_values(common)
    state["model"] = {local: _Stored(name) for local, name in names}
    if common.get("optimizer") is None:
        return state
    shapes = [(name, len(stored[name]["shape"])) for _, name in names if not is_buffer(name)]
    groups = numbered_groups(param_groups(common, with_step=False), shapes, asked)
    kinds = {key.removeprefix(STATE_PREFIX).split(".")[0] for key in stored if split_state(key)[0]}
    moments: dict[int, dict[str, Any]] = {}
    for group, members in groups:
        for number, name in zip(group["params"], members, strict=True):
            moments[number] = {"step": torch.tensor(float(common["optimizer"]["step"]))}
            for kind in sorted(kinds - {"fp32_param"}):
                moments[number][kind] = _Stored(f"{STATE_PREFIX}{kind}.{name}")
    inner = {"state": moments, "param_groups": [group for group, _ in groups]}
    state["optimizer"] = inner
    if is_half(common):
        mains = [
            [_Stored(f"{STATE_PREFIX}fp32_param.{name}") for name in members]
            for _, members in groups
        ]
        state["optimizer"] = {
            "optimizer": inner,
            **grad_scaler(common),
            "fp32_from_fp16_params": mains,
        }
    return state


def _flattened(
    tree: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[str, tuple[tuple[Any, ...], Any]]]:
    """(key, (path, leaf)) as torch flattens: plain lists and tuples stay whole."""
    if isinstance(tree, Mapping):
        steps: list[tuple[Any, Any]] = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and any(isinstance(v, Mapping | list | _Stored) for v in tree):
        steps = list(enumerate(tree))
    else:
        yield ".".join(map(str, path)), (path, tree)
        return
    for step, value in steps:
        yield from _flattened(value, (*path, step))
