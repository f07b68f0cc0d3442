"""Base of the readers of Megatron-LM's formats: strided boxes, and values other than tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointDamaged
from megatron.core.config.value_types import Arguments, JsonObject, Nested, Shape, Unpickled
from megatron.core.dist_checkpointing.key_names import is_vocabulary
from megatron.core.dist_checkpointing.manifest import (
    COMMON_FILE,
    METADATA,
    RERUN_STATE,
    RNG_STATE,
    TRUE_VOCAB_SIZE,
    Layout,
    Manifest,
    is_count,
    parsing,
    read_checked,
    read_manifest,
)
from megatron.core.dist_checkpointing.megatron_formats.archive import MappedFile, StoredArray
from megatron.core.dist_checkpointing.megatron_formats.dcp_index import DcpTensor, ForeignPiece
from megatron.core.dist_checkpointing.megatron_formats.names import (
    OUTPUT,
    sharding_of,
    split_expert,
    split_state,
)
from megatron.core.dist_checkpointing.megatron_formats.reference_values import (
    COUNTERS,
    FLOPS,
    RERUN_STATES,
)
from megatron.core.dist_checkpointing.megatron_formats.unpickler import Record
from megatron.core.dist_checkpointing.plain_values import plain, to_json
from megatron.core.dist_checkpointing.reader import Box, CheckpointReader, StoredBox, StoredTensor
from megatron.core.enums import AttnBackend
from megatron.core.parallel.process_groups_config import make_grids
from megatron.core.parallel.rank_grid import RankGrid
from megatron.core.params.param_info import ParamInfo

STATE_PREFIX = "optimizer.state."
# Text of an unpickled enum record -> value of this project's command line.
_NAMES = {f"AttnBackend({backend.value})": backend.name for backend in AttnBackend}
_CUDA_STATE_BYTES = 16
_MOST = 1 << 20
# Integers of the command line that determine the layout.  Bounded, as lists get that many entries.
_DEGREES = (
    "world_size data_parallel_size context_parallel_size tensor_model_parallel_size "
    "pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "expert_model_parallel_size expert_tensor_parallel_size num_layers num_experts "
    "num_attention_heads num_query_groups mtp_num_layers"
).split()
_SIZES = (
    *("make_vocab_size_divisible_by", TRUE_VOCAB_SIZE, "ddp_bucket_size", "ddp_num_buckets"),
    *COUNTERS,
)


class ForeignReader(CheckpointReader):
    """Reader of a checkpoint in another program's format, under this project's keys.

    If this project wrote the checkpoint, it has a manifest, and files are compared with it.  A
    tensor is compared with the checksum that torch.save stored for it when it is read.

    A subclass sets ``values`` (values other than tensors, in that format), calls `_add` for each
    box, and then `_finish`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.values: Mapping[str, Unpickled] = {}
        self._whole: set[str] = set()
        self._maps: dict[Path, MappedFile] = {}
        self._found: dict[str, tuple[torch.dtype, list[ForeignPiece]]] = {}
        ours = read_manifest(folder)
        for name in (METADATA, COMMON_FILE):  # pickles have no checksum of their own
            if ours is not None and name in ours.files:
                read_checked(folder, name, ours)

    def common(self) -> JsonObject:
        with parsing(self.folder):
            return common_values(self.values, self.iteration)

    def rank_state(self, rank: int) -> JsonObject | None:
        if not self.manifest.layout.get("dense"):
            return None
        found = {}
        with parsing(self.folder):
            if (state := self._rng_state(rank)) is not None:
                found[RNG_STATE] = rng_state_of(state)
            reruns = json.loads(self.values.get(RERUN_STATES, "[]"))
            if rank < len(reruns) and reruns[rank] is not None:
                found[RERUN_STATE] = reruns[rank]
        return found or None

    def _rng_state(self, rank: int) -> Unpickled | None:
        """Return the random states of ``rank`` of the writing run; None if there are none."""
        return None

    def close(self) -> None:
        self._maps.clear()

    @property
    def args(self) -> Arguments:
        """Command line of the run that wrote the checkpoint."""
        args = self.values.get("args")
        return {} if args is None else vars(args)

    @property
    def iteration(self) -> int:
        return int(self.values.get("iteration", 0))

    def _coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank`` in the dense rank grid of the writing run."""
        return RankGrid(dict(self.manifest.layout["dense"])).coordinate(rank)

    def _map(self, path: Path) -> MappedFile:
        if path not in self._maps:
            self._maps[path] = MappedFile(path)
        return self._maps[path]

    def _add(self, key: str, dtype: torch.dtype, piece: ForeignPiece) -> None:
        self._found.setdefault(key, (dtype, []))[1].append(piece)

    def _place(self, prefix: str, name: str, rank: int, array: StoredArray) -> None:
        """Add the shard of tensor-parallel ``rank``.

        For an expert, ``rank`` is the rank in the expert tensor-parallel group.  Skips copies: tied
        output layers, and unsharded tensors of ranks above 0.
        """
        tp = degree(self.args, "tensor")
        if split_expert(name):
            tp = expert_tensor_degree(self.args)
        is_copy = name == OUTPUT and not self.args.get("untie_embeddings_and_output_weights")
        dim, blocks = sharding_of(name, self.args)
        if is_copy or (dim is None and rank > 0):
            return
        shape = list(array.shape)
        if dim is not None:
            shape[dim] *= tp
        info = ParamInfo(
            global_shape=tuple(shape),
            shard_dim=dim,
            shard_index=rank,
            shard_count=1 if dim is None else tp,
            blocks=blocks,
        )
        for offset, view in info.pieces(array.view):
            self._add_rows(prefix + name, offset, replace(array, view=view))

    def _add_rows(self, key: str, offset: Shape, array: StoredArray) -> None:
        """Add a box, its query, key and value rows in our order (`_in_our_order`)."""
        version = float(self.values.get("checkpoint_version", 0))
        heads = int(self.args.get("num_attention_heads") or 1) // degree(self.args, "tensor")
        parts: Iterable[tuple[int, StoredArray]] = [(0, array)]
        if version < 2 and "linear_qkv" in key:
            parts = _in_our_order(array, version, max(1, heads))
        for row, part in parts:
            at = (offset[0] + row, *offset[1:]) if offset else ()
            self._add(key, part.dtype, ForeignPiece(at, part.shape, partial(part.__getitem__, ())))

    def _finish(self) -> None:
        """Set ``tensors`` and ``manifest``.  The shape of a tensor is the span of its pieces.

        Main parameters of fp32 weights are left out, as they have the same values.
        """
        for key, (dtype, pieces) in self._found.items():
            prefix, name = split_state(key)
            is_main = prefix == f"{STATE_PREFIX}fp32_param."
            if is_main and name in self._found and self._found[name][0] == torch.float32:
                continue
            shape = span_of(pieces)
            if sum(prod(piece.shape) for piece in pieces) != prod(shape):
                raise CheckpointDamaged(f"{self.folder}: parts of {key} {list(shape)} are missing")
            padding = 0
            if is_vocabulary(name):
                # How many rows may be padding.  The writing run need not have padded for its own
                # layout: --use-checkpoint-args keeps the padded size of an earlier run,
                # --padded-vocab-size sets any.
                multiple = int(self.args.get("make_vocab_size_divisible_by") or 128)
                of_layout = multiple * degree(self.args, "tensor") - 1
                true_size = int(self.args.get(TRUE_VOCAB_SIZE) or shape[0])
                padding = max(of_layout, shape[0] - true_size)
            self.tensors[key] = StoredTensor(shape, dtype, tuple(pieces), padding)
        self._found.clear()
        self.manifest = read_manifest(self.folder) or Manifest(
            iteration=self.iteration, layout=layout_of(self.args), files={}
        )

    def _read_piece(self, key: str, piece: StoredBox, box: Box, target: Tensor) -> None:
        assert isinstance(piece, ForeignPiece)
        with parsing(self.folder):
            found = piece.array()[box]
            target.copy_(found.read() if isinstance(found, StoredArray) else found)


def span_of(pieces: Iterable[StoredBox]) -> Shape:
    """Return the shape of the tensor that ``pieces`` fill: their largest end in each dimension."""
    ends = [tuple(map(sum, zip(p.offset, p.shape, strict=True))) for p in pieces]
    return tuple(map(max, zip(*ends, strict=True)))


def _in_our_order(
    array: StoredArray, version: float, heads: int
) -> Iterator[tuple[int, StoredArray]]:
    """Yield (row in our order, stored rows) of the QKV matrix of a rank with ``heads`` heads.

    Our order: query, key and value rows of each head in turn.  Checkpoint version 0 stores all
    queries, then all keys, then all values; version 1 alternates rows of the three within a head.
    """
    width = array.shape[0] // (3 * heads)
    for head in range(heads):
        for kind in range(3):
            first = (kind * heads + head) * width
            rows = slice(first, first + width)
            if version >= 1:
                first = head * width * 3 + kind
                rows = slice(first, first + 3 * width, 3)
            yield (head * 3 + kind) * width, array[rows]


def common_values(values: Mapping[str, Unpickled], iteration: int) -> JsonObject:
    """Convert Megatron-LM's values to `Contents.common` of this project."""
    args = values.get("args")
    arguments = {} if args is None else vars(args)
    lengths = ["seq_length"]
    if arguments.get("model_kind") == "t5":
        lengths.append("decoder_seq_length")
    numbers = {name: int(arguments.get(name) or 0) for name in (*COUNTERS, *lengths)}
    counters = {name: numbers[name] for name in COUNTERS}
    tokens = sum(numbers[name] for name in lengths)
    counters["num_tokens"] = counters["consumed_train_samples"] * tokens
    return {
        "checkpoint_version": values.get("checkpoint_version", 0),
        "iteration": iteration,
        "counters": {**counters, "iteration": iteration, FLOPS: values.get(FLOPS, 0.0)},
        "args": as_json(arguments),
        "optimizer": _optimizer_scalars(values.get("optimizer")),
        "opt_param_scheduler": as_json(
            values.get("opt_param_scheduler", values.get("lr_scheduler"))
        ),
    }


def _optimizer_scalars(state: Unpickled) -> JsonObject | None:
    """Return step, parameter groups and loss scale from the state of any kind of optimizer."""
    if isinstance(state, list) or isinstance(state, dict) and 0 in state:
        state = state[0]  # several optimizers with equal step counts
    if not isinstance(state, dict):
        return None
    inner = state.get("optimizer", state)
    per_param = inner.get("state") or {}
    steps = [per_param.get("common_step")]
    steps += [s.get("step") for s in per_param.values() if isinstance(s, dict)]
    groups = [*inner.get("param_groups", ()), *inner.get("param_to_group_meta", {}).values()]
    steps += [group.get("step") for group in groups]
    known = [float(as_json(step)) for step in steps if step is not None]
    scalars: JsonObject = {"step": max(known, default=0.0), "param_groups": []}
    for group in as_json(groups):
        plain = {key: value for key, value in group.items() if key not in ("params", "step")}
        if plain not in scalars["param_groups"]:
            scalars["param_groups"].append(plain)
    if state.get("grad_scaler"):
        scalars["grad_scaler"] = as_json(state["grad_scaler"])
    return scalars


def as_json(value: object) -> Nested:
    """Return ``value`` as JSON; types that JSON does not have become text."""
    return plain(value, _convert)


def _convert(value: object) -> object:
    if isinstance(value, DcpTensor):
        value = value.chunks[0].array()
    if isinstance(value, StoredArray):
        value = value.read()
    if isinstance(value, Tensor):
        return value.item()
    if type(value).__name__ == "Namespace":
        return vars(value)
    if isinstance(value, Record) and type(value).__name__.endswith("Path"):
        return "/".join(value.pickled_args).replace("//", "/")
    return _NAMES.get(str(value), str(value))


def rng_state_of(state: Mapping[str, Unpickled]) -> JsonObject:
    """Return random states as JSON; the device's state is None if the run was on CPU."""
    on_device = state.get("cuda_rng_state")
    if on_device is not None:
        on_device = on_device.read() if on_device.shape == (_CUDA_STATE_BYTES,) else None
    return to_json(
        {
            **state,
            "torch_rng_state": state["torch_rng_state"].read(),
            "cuda_rng_state": on_device,
            "rng_tracker_states": {k: v.read() for k, v in state["rng_tracker_states"].items()},
        }
    )


def layout_of(arguments: Arguments) -> Layout:
    """Return degrees and rank order of the writing run; empty if its command line lacks them."""
    if "world_size" not in arguments:
        return {}
    try:
        grids = make_grids(
            int(arguments["world_size"]),
            tp=degree(arguments, "tensor"),
            pp=degree(arguments, "pipeline"),
            cp=int(arguments.get("context_parallel_size") or 1),
            ep=degree(arguments, "expert"),
            expt_tp=arguments.get("expert_tensor_parallel_size"),
            order="tp-cp-ep-pp-dp" if arguments.get("use_tp_pp_dp_mapping") else "tp-cp-ep-dp-pp",
        )
    except ValueError:
        return {}
    dense, expert = ([list(axis) for axis in grid.sizes.items()] for grid in grids)
    return {"world_size": arguments["world_size"], "dense": dense, "expert": expert}


def check_args(arguments: Arguments) -> None:
    """Raise ValueError for a command line with impossible degrees or sizes."""
    for name in (*_DEGREES, *_SIZES):
        value = arguments.get(name)
        if value is not None and (not is_count(value) or (name in _DEGREES and value > _MOST)):
            raise ValueError(f"args.{name} is {value!r}")


def degree(arguments: Arguments, kind: str) -> int:
    """Return ``--{kind}-model-parallel-size`` of a command line."""
    return int(arguments.get(f"{kind}_model_parallel_size") or 1)


def expert_tensor_degree(arguments: Arguments) -> int:
    """Return the number of ranks that shard one expert."""
    return int(arguments.get("expert_tensor_parallel_size") or degree(arguments, "tensor"))
