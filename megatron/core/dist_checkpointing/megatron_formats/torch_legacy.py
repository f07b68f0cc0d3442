"""Format ``torch``, for any layout: one file per tensor-parallel rank and stage.

    mp_rank_{tp:02d}[_{pp:03d}][_{ep:03d}]/
        model_optim_rng.pt    weights, optimizer, scheduler, random states
        distrib_optim.pt      buffers of the distributed optimizer

Names in a file are local: layers are numbered from 0 in every model chunk, experts on every rank.
The name determines how a tensor is sharded (`names.sharding_of`).  Optimizer state has no names: it
is in the order of the parameter groups or of the buffers (`optimizer_order`).  With
expert parallelism, experts have a separate optimizer.

To write it, all ranks first write this project's own format into a subfolder; rank 0 then converts
it, file by file, and deletes it.  Names in a file are those of the layers of --transformer-impl.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from math import lcm, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import (
    Arguments,
    JsonObject,
    Nested,
    Shape,
    StateDict,
    Unpickled,
)
from megatron.core.dist_checkpointing.formats import (
    SAFETENSORS_DIST,
    Format,
    RankReport,
    RankSave,
    files_of,
)
from megatron.core.dist_checkpointing.manifest import (
    RNG_STATE,
    Common,
    FileEntries,
    Manifest,
    fsync_folder,
    parsing,
    write_manifest,
)
from megatron.core.dist_checkpointing.megatron_formats.archive import (
    StoredArray,
    load_archive,
    save_archive,
)
from megatron.core.dist_checkpointing.megatron_formats.foreign_reader import (
    STATE_PREFIX,
    ForeignReader,
    check_args,
    degree,
    expert_tensor_degree,
    layout_of,
)
from megatron.core.dist_checkpointing.megatron_formats.names import (
    Names,
    is_before_core,
    is_buffer,
    is_expert,
    our_name,
    sharding_of,
    split_expert,
    split_layer,
    split_state,
    stage_names,
)
from megatron.core.dist_checkpointing.megatron_formats.optimizer_order import (
    BUFFER_KINDS,
    Chunks,
    State,
    numbered_groups,
    optimizer_state,
    starts_in_buffer,
)
from megatron.core.dist_checkpointing.megatron_formats.reference_values import (
    grad_scaler,
    has_two_optimizers,
    is_distributed,
    numbered_optimizer,
    param_groups,
    reference_rng,
    reference_values,
    rerun_entry,
)
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.dist_checkpointing.validation import AMAX_HISTORY, shorten
from megatron.core.parallel.rank_grid import RankGrid
from megatron.core.params.param_info import ParamInfo

MODEL_FILE = "model_optim_rng.pt"
BUFFER_FILE = "distrib_optim.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_OLDER_GROUPED = re.compile(r"(.*\.experts)\.weight([12])$")

Rank = tuple[int, int, int]  # tensor-parallel rank, pipeline stage, expert-parallel rank


class TorchLegacyReader(ForeignReader):
    """Reader of a checkpoint in format torch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._ranks = self._load_ranks()
        self.values = self._ranks[0, 0, 0]
        self._check_complete()
        self._models = {rank: _models(content) for rank, content in self._ranks.items()}
        met: set[Shape] = set()
        for rank in sorted(self._ranks):
            with parsing(folder / folder_name(rank, self.args) / MODEL_FILE):
                self._add_rank(rank, met)
        with parsing(folder):
            self._finish()

    def _add_rank(self, rank: Rank, met: set[Shape]) -> None:
        """Add the shards of ``rank`` that are not in ``met``: files of several ranks repeat shards.

        Expert shards repeat over tensor-parallel ranks, other shards over expert-parallel ranks.
        """
        tp, pp, ep = rank
        params = [list(self._params(rank, chunk)) for chunk in range(len(self._models[rank]))]
        found = [("", name, array) for chunk in params for name, array in chunk]
        trained = [[p for p in chunk if not is_buffer(p[0])] for chunk in params]
        for kind, name, array in self._optimizer_state(rank, trained):
            found.append((f"{STATE_PREFIX}{kind}.", name, array))
        dense = (tp, pp)
        of_experts = (tp % expert_tensor_degree(self.args), pp, ep)
        is_new = {shard: shard not in met for shard in (dense, of_experts)}
        met.update(is_new)
        for prefix, whole_name, whole in found:
            for name, array in self._experts_apart(whole_name, whole, ep):
                shard = of_experts if split_expert(name) else dense
                if is_new[shard]:
                    self._place(prefix, name, shard[0], array)

    def _experts_apart(
        self, name: str, array: StoredArray, ep: int
    ) -> Iterator[tuple[str, StoredArray]]:
        """Yield a rank's experts separately if they are one tensor, concatenated and transposed."""
        found = _OLDER_GROUPED.match(name)
        if not found:
            yield name, array
            return
        experts = _experts_of_rank(self.args, ep)
        count = len(experts)
        rows, columns = array.shape
        shape = (rows, columns // count) if found[2] == "1" else (rows // count, columns)
        for i, expert in enumerate(experts):
            own = f"{found[1]}.local_experts.{expert}.linear_fc{found[2]}.weight"
            yield own, array.flat(i * prod(shape), shape).t()

    def _rng_state(self, rank: int) -> Unpickled | None:
        at = self._coordinate(rank)
        ep = RankGrid(dict(self.manifest.layout["expert"])).coordinate(rank).get("ep", 0)
        states = self._ranks.get((at["tp"], at["pp"], ep), {}).get("rng_state")
        return states[at["dp"] % len(states)] if states else None

    def _load_ranks(self) -> dict[Rank, StateDict]:
        """Return the contents of the file of each rank."""
        ranks = {}
        for path in sorted(self.folder.glob("mp_rank_*")):
            found = _FOLDER.fullmatch(path.name)
            if found is None:
                continue  # not a folder of this format
            content = load_archive(self._map(path / MODEL_FILE))
            with parsing(path / MODEL_FILE):
                if not isinstance(content, dict) or not _models(content):
                    raise CheckpointError(f"{path / MODEL_FILE} holds no model")
                arguments = vars(content["args"]) if content.get("args") is not None else {}
                check_args(arguments)
            numbers = [int(number) for number in found.groups() if number is not None]
            if len(numbers) == 2 and degree(arguments, "pipeline") == 1:
                numbers.insert(1, 0)  # the second number is the expert-parallel rank
            tp, pp, ep = (*numbers, 0, 0)[:3]
            ranks[tp, pp, ep] = content
        if (0, 0, 0) not in ranks:
            raise CheckpointDamaged(f"{self.folder / 'mp_rank_00'} is missing")
        return ranks

    def _check_complete(self) -> None:
        if self._ranks.keys() != set(ranks_of(self.args)):
            sizes = " x ".join(
                f"--{kind}-model-parallel-size {degree(self.args, kind)}"
                for kind in ("tensor", "pipeline", "expert")
                if kind == "tensor" or degree(self.args, kind) > 1
            )
            raise CheckpointDamaged(
                f"{self.folder} has the files of {len(self._ranks)} ranks, it was written with "
                f"{sizes}: copy the missing mp_rank_* folders"
            )

    def _params(self, rank: Rank, chunk: int) -> Iterator[tuple[str, StoredArray]]:
        """Yield the global name and the array of each tensor of a model chunk.

        The layers of chunk c follow those of chunk c - 1 of all stages.
        """
        _, stage, ep = rank
        before = Counter(
            stack
            for c in range(chunk + 1)
            for p in range(degree(self.args, "pipeline") if c < chunk else stage)
            for stack in _stacks(self._models[0, p, 0][c])
        )
        first = _experts_of_rank(self.args, ep).start
        model = self._models[rank][chunk]
        before_core = is_before_core(model)
        for local, array in model.items():
            name = our_name(local, before_core=before_core)
            if layer := split_layer(name):
                name = f"{layer[0]}.{layer[1] + before[layer[0]]}.{layer[2]}"
            if expert := split_expert(name):
                name = f"{expert[0]}.local_experts.{expert[1] + first}.{expert[2]}"
            yield name, array

    def _optimizer_state(self, rank: Rank, params: Chunks) -> list[State]:
        optimizer = self._ranks[rank].get("optimizer")
        if optimizer is None:
            return []
        path = self.folder / folder_name(rank, self.args)
        buffers, hint = None, f", and there is no {BUFFER_FILE}"
        if (path / BUFFER_FILE).exists():
            buffers, hint = load_archive(self._map(path / BUFFER_FILE)), ""
        what = f"{path}: the optimizer's state"
        return optimizer_state(what, optimizer, buffers, params, self.args, rank[1], hint)


def _experts_of_rank(arguments: Arguments, ep: int) -> range:
    """Return the numbers of the experts of an expert-parallel rank."""
    size = int(arguments.get("num_experts") or 0) // degree(arguments, "expert")
    return range(ep * size, (ep + 1) * size)


def _models(content: StateDict) -> list[dict[str, StoredArray]]:
    """Return the tensors of each model chunk, in model order, by their names in the file."""
    keys = sorted(key for key in content if re.fullmatch(r"model\d+", str(key)))
    if "model" in content:
        keys = ["model"]
    return [dict(_leaves(content[key])) for key in keys]


def _leaves(tree: Nested, prefix: str = "") -> Iterator[tuple[str, StoredArray]]:
    """Yield the tensors of nested dictionaries, in which models before Megatron Core are stored."""
    for name, value in tree.items():
        if isinstance(value, StoredArray) and not name.endswith("_extra_state"):
            yield prefix + name, value
        elif isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")


def _stacks(model: Mapping[str, StoredArray]) -> list[str]:
    """Return the name of the stack of each layer."""
    before_core = is_before_core(model)
    layers = (split_layer(our_name(name, before_core=before_core)) for name in model)
    return [stack for stack, _ in {layer[:2] for layer in layers if layer}]


def ranks_of(arguments: Arguments) -> list[Rank]:
    """Return the ranks that have a file: one for each shard of experts and of other tensors.

    Raises CheckpointError if a file would need several shards of one expert.
    """
    tp, pp, ep = (degree(arguments, kind) for kind in ("tensor", "pipeline", "expert"))
    expert_tp = expert_tensor_degree(arguments)
    if tp % expert_tp:
        raise CheckpointError(
            f"format torch has no files for --expert-tensor-parallel-size {expert_tp} with "
            f"--tensor-model-parallel-size {tp}: use torch_dist"
        )
    ranks = range(lcm(tp, expert_tp * ep))
    both = sorted({(rank % tp, rank // expert_tp % ep) for rank in ranks})
    return [(t, stage, e) for stage in range(pp) for t, e in both]


def folder_name(rank: Rank, arguments: Arguments) -> str:
    """Return the folder name of a rank."""
    stage = f"_{rank[1]:03d}" if degree(arguments, "pipeline") > 1 else ""
    expert = f"_{rank[2]:03d}" if degree(arguments, "expert") > 1 else ""
    return f"mp_rank_{rank[0]:02d}{stage}{expert}"


_PARTS = "parts"


def write_rank_files(rank_save: RankSave) -> RankReport:
    """Write this rank's share in our own format, in a subfolder.  Local.  Raises OSError."""
    parts = rank_save.folder / _PARTS
    parts.mkdir(exist_ok=True)
    report = SAFETENSORS_DIST.write_rank_files(replace(rank_save, folder=parts))
    return RankReport(objects=asdict(report))


def write_common_files(folder: Path, reports: Sequence[RankReport], common: Common) -> FileEntries:
    """Convert the files of all ranks to format torch, and delete them."""
    parts = folder / _PARTS
    reports = [RankReport.from_json(report.objects) for report in reports]
    files = {**files_of(reports), **SAFETENSORS_DIST.write_common_files(parts, reports, common)}
    layout = layout_of(common["args"])
    manifest = Manifest(iteration=common["iteration"], layout=layout, files=files)
    write_manifest(parts, manifest)
    written = {}
    with CheckpointReader(parts) as reader:
        tree = _Tree(reader, common)
        tree.check_names()
        for rank in ranks_of(tree.args):  # one rank's shards are in memory at a time
            name = folder_name(rank, tree.args)
            (folder / name).mkdir()
            for file, content in tree.files_of(rank):
                written[f"{name}/{file}"] = save_archive(folder / name / file, content)
            fsync_folder(folder / name)
    shutil.rmtree(parts)
    return written


TORCH = Format("torch", write_rank_files, write_common_files, is_foreign=True, num_copies=2)


class _Tree:
    """Contents of the files of all ranks of the layout in the command line."""

    def __init__(self, reader: CheckpointReader, common: Common) -> None:
        self.reader = reader
        self.common = common
        self.args: Arguments = common["args"]
        self.tp = degree(self.args, "tensor")
        self.pp = degree(self.args, "pipeline")
        self.num_chunks = int(self.args.get("virtual_pipeline_model_parallel_size") or 1)
        self.states: list[tuple[Mapping[str, int], JsonObject]] = []  # of each rank, by coordinate
        if layout := reader.manifest.layout:
            grid = RankGrid(dict(layout["dense"]))
            ranks = range(int(layout["world_size"]))
            self.states = [(grid.coordinate(r), reader.rank_state(r) or {}) for r in ranks]

    def check_names(self) -> None:
        """Raise CheckpointError unless every weight is in some file."""
        if self.pp > 1 and self.args.get("model_kind") == "t5":
            raise CheckpointError(
                f"format torch has no files for the {self.pp} stages of a T5: use --ckpt-format "
                "torch_dist, or convert for one stage"
            )
        stages = product(range(self.pp), range(self.num_chunks))
        placed = {name for stage in stages for _, name in self._names(*stage, None)}
        names = (key for key in self.reader.tensors if not key.endswith(AMAX_HISTORY))
        lost = [key for key in names if split_state(key)[1] not in placed]
        if lost:
            raise CheckpointError(
                f"format torch cannot store {shorten(lost)}: use --ckpt-format torch_dist"
            )

    def files_of(self, rank: Rank) -> Iterator[tuple[str, object]]:
        """Yield name and contents of each file of a rank."""
        tp, pp, ep = rank
        content = reference_values(self.common)
        experts = _experts_of_rank(self.args, ep)
        chunks = [list(self._names(pp, chunk, experts)) for chunk in range(self.num_chunks)]
        for number, names in enumerate(chunks):
            key = "model" if len(chunks) == 1 else f"model{number}"
            content[key] = {local: self._shard(name, tp) if name else None for local, name in names}
        params = [[n for _, n in names if n and not is_buffer(n)] for names in chunks]
        buffers = None
        if self.common.get("optimizer") is not None:
            content["optimizer"], buffers = self._optimizers(params, tp, pp)
        first = next((state for at, state in self.states if (at["tp"], at["pp"]) == (tp, pp)), {})
        if RNG_STATE in first:
            content["rng_state"] = [reference_rng(first[RNG_STATE])]
        if rank == (0, 0, 0):
            content |= rerun_entry(state for _, state in self.states)
        yield MODEL_FILE, content
        if buffers is not None:
            yield BUFFER_FILE, buffers

    def _names(self, pp: int, chunk: int, experts: Sequence[int] | None) -> Names:
        """Yield local name and global name of a chunk's tensors, in the order of the model.

        The global name is empty for an ``_extra_state`` entry, which has no tensor.
        """
        layers = self.common.get("stages")
        stage = chunk * self.pp + pp
        stored = self.reader.tensors
        return stage_names(stored, self.args, stage, experts=experts, layers=layers)

    def _shard(self, name: str, tp: int, prefix: str = "") -> Tensor:
        """Return the shard of a tensor-parallel rank."""
        key = prefix + name
        dim, blocks = sharding_of(name, self.args)
        if dim is None:
            return self.reader.read(key)
        stored = self.reader.tensors[key]
        count = expert_tensor_degree(self.args) if is_expert(name) else self.tp
        shape = list(stored.shape)
        if any(shape[dim] * block // sum(blocks) % count for block in blocks):
            raise CheckpointError(
                f"{name} of shape {shape} cannot be sharded with "
                f"--tensor-model-parallel-size {count}"
            )
        shape[dim] //= count
        info = ParamInfo(
            global_shape=stored.shape,
            shard_dim=dim,
            shard_index=tp % count,
            shard_count=count,
            blocks=blocks,
        )
        out = torch.empty(shape, dtype=stored.dtype)
        for offset, view in info.pieces(out):
            self.reader.read_box(key, offset, view)
        return out

    def _state(self, tp: int, kind: str, name: str) -> Tensor:
        """Return optimizer state; fp32 weights are their own main parameters."""
        prefix = f"{STATE_PREFIX}{kind}."
        return self._shard(name, tp, prefix if prefix + name in self.reader.tensors else "")

    def _optimizers(self, chunks: list[list[str]], tp: int, pp: int) -> tuple[object, object]:
        """Return the entry of the optimizer, and the contents of the buffer file.

        Both are lists of two if experts have a separate optimizer.
        """
        if not has_two_optimizers(self.common) or not any(map(is_expert, sum(chunks, []))):
            return self._optimizer(chunks, tp, pp)
        both = []
        for which in (False, True):
            mine = [[n for n in chunk if is_expert(n) is which] for chunk in chunks]
            both.append(self._optimizer(mine, tp, pp, which))
        states, buffers = map(list, zip(*both, strict=True))
        return states, buffers if is_distributed(self.common) else None

    def _optimizer(
        self, chunks: list[list[str]], tp: int, pp: int, of_experts: bool = False
    ) -> tuple[StateDict, StateDict | None]:
        common, stored = self.common, self.reader.tensors
        params = [(name, len(stored[name].shape)) for names in chunks for name in names]
        if is_distributed(common):
            known = param_groups(common, with_step=True)
            groups = [group for group, _ in numbered_groups(known, params, self.args)]
            for group in groups:
                del group["params"]
            state = {"optimizer": {"param_groups": groups}, **grad_scaler(common)}
            return state, self._buffers(chunks, tp, pp, of_experts)
        kinds = {key.split(".")[2] for key in stored if key.startswith(STATE_PREFIX)}
        kinds &= {"exp_avg", "exp_avg_sq", "momentum_buffer"}
        return numbered_optimizer(common, params, kinds, partial(self._state, tp)), None

    def _buffers(self, chunks: list[list[str]], tp: int, pp: int, of_experts: bool) -> StateDict:
        buffers: dict[Any, object] = {"buckets_coalesced": True}
        for number, names in enumerate(names for names in chunks if names):
            mains = {name: self._state(tp, "fp32_param", name) for name in names}
            numels = [(name, main.numel()) for name, main in mains.items()]
            starts, total = starts_in_buffer(
                numels,
                self.args,
                num_params=sum(numel for _, numel in numels),
                is_first=pp == 0 and number == 0,
                of_experts=of_experts,
            )
            entry: StateDict = {}
            for key, kind in BUFFER_KINDS.items():
                entry[key] = flat = torch.zeros(total)
                for name, start in zip(names, starts, strict=True):
                    values = mains[name] if key == "param" else self._state(tp, kind, name)
                    flat[start : start + values.numel()] = values.reshape(-1)
            entry["numel_unpadded"] = total
            dtype = self.reader.tensors[names[0]].dtype
            in_fp32 = any(map(self.args.get, ("accumulate_allreduce_grads_in_fp32", "bf16")))
            buffers[number] = {(dtype, torch.float32 if in_fp32 else dtype): entry}
        return buffers
