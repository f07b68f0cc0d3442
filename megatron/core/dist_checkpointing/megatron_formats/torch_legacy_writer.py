"""Write format ``torch`` for any tensor- and pipeline-parallel layout, from any checkpoint.

All ranks first write this project's own format into a subfolder; rank 0 then converts it, file by
file, and deletes it.  Names in a file are those of the layers of ``--transformer-impl``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Arguments, JsonObject, StateDict
from megatron.core.dist_checkpointing.format import (
    SAFETENSORS_DIST,
    Format,
    RankReport,
    RankSave,
    files_of,
)
from megatron.core.dist_checkpointing.manifest import (
    RERUN_STATE,
    RNG_STATE,
    Common,
    FileEntry,
    Manifest,
    adopt_file,
    fsync_folder,
    write_manifest,
)
from megatron.core.dist_checkpointing.megatron_formats.buffers import bucket_rules, starts_in_buffer
from megatron.core.dist_checkpointing.megatron_formats.foreign_reader import (
    STATE_PREFIX,
    degree,
    expert_tensor_degree,
    layout_of,
)
from megatron.core.dist_checkpointing.megatron_formats.model_order import ordered_names
from megatron.core.dist_checkpointing.megatron_formats.names import (
    OUTPUT,
    is_buffer,
    is_expert,
    is_vocabulary,
    sharding_of,
    split_layer,
    split_state,
)
from megatron.core.dist_checkpointing.megatron_formats.optimizer_order import (
    BUFFER_KINDS,
    numbered_groups,
)
from megatron.core.dist_checkpointing.megatron_formats.pickler import write_archive
from megatron.core.dist_checkpointing.megatron_formats.reference_values import (
    grad_scaler,
    has_two_optimizers,
    is_distributed,
    numbered_optimizer,
    param_groups,
    reference_rng,
    reference_values,
)
from megatron.core.dist_checkpointing.megatron_formats.rerun_values import (
    RANKS,
    reference_mode,
    reference_rerun,
)
from megatron.core.dist_checkpointing.megatron_formats.torch_legacy import (
    BUFFER_FILE,
    MODEL_FILE,
    Rank,
    folder_name,
    ranks_of,
)
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.dist_checkpointing.validation import AMAX_HISTORY, shorten
from megatron.core.parallel.rank_grid import RankGrid
from megatron.core.params.param_info import ParamInfo

_PARTS = "parts"

_Buffers = dict[str | int, object]  # number of a buffer -> its state; also `buckets_coalesced`


def write_rank_files(rank_save: RankSave) -> RankReport:
    """Write this rank's share in our own format, in a subfolder.  Local.  Raises OSError."""
    parts = rank_save.folder / _PARTS
    parts.mkdir(exist_ok=True)
    report = SAFETENSORS_DIST.write_rank_files(replace(rank_save, folder=parts))
    return RankReport(objects=asdict(report))


def complete(folder: Path, reports: Sequence[RankReport], common: Common) -> dict[str, FileEntry]:
    """Convert the files of all ranks to format torch, and delete them."""
    parts = folder / _PARTS
    reports = [RankReport.from_json(report.objects) for report in reports]
    files = {**files_of(reports), **SAFETENSORS_DIST.complete(parts, reports, common)}
    layout = layout_of(common["args"])
    manifest = Manifest(iteration=common["iteration"], layout=layout, files=files)
    write_manifest(parts, manifest)
    with CheckpointReader(parts) as reader:
        written = write_tree(reader, folder, common)
    shutil.rmtree(parts)
    return written


TORCH = Format("torch", write_rank_files, complete, is_foreign=True, num_copies=2)


def write_tree(reader: CheckpointReader, folder: Path, common: Common) -> dict[str, FileEntry]:
    """Write and fsync the files of every rank of the layout in ``common["args"]``.

    One rank's shards are in memory at a time.  Raises OSError, CheckpointError.
    """
    tree = _Tree(reader, common)
    tree.check_names()
    files = {}
    for rank in ranks_of(tree.args):
        name = folder_name(rank, tree.args)
        (folder / name).mkdir()
        for file, content in tree.files_of(rank):
            write_archive(folder / name / file, content)
            files[f"{name}/{file}"] = adopt_file(folder / name / file)
        fsync_folder(folder / name)
    return files


@dataclass(frozen=True)
class _Tree:
    """Contents of the files of all ranks."""

    reader: CheckpointReader
    common: Common

    @property
    def args(self) -> Arguments:
        args: Arguments = self.common["args"]
        return args

    @property
    def tp(self) -> int:
        return degree(self.args, "tensor")

    @property
    def pp(self) -> int:
        return degree(self.args, "pipeline")

    def check_names(self) -> None:
        """Raise CheckpointError unless every weight is in some file."""
        if self.pp > 1 and self.args.get("model_kind") == "t5":
            raise CheckpointError(
                f"format torch has no files for the {self.pp} stages of a T5: use --ckpt-format "
                "torch_dist, or convert for one stage"
            )
        stages = range(self.pp * self._num_chunks())
        every = range(int(self.args.get("num_experts") or 0))
        placed = {n for s in stages for _, n in self._names(s % self.pp, s // self.pp, every)}
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
        size = int(self.args.get("num_experts") or 0) // degree(self.args, "expert")
        experts = range(ep * size, (ep + 1) * size)
        chunks = [list(self._names(pp, chunk, experts)) for chunk in range(self._num_chunks())]
        for number, names in enumerate(chunks):
            key = "model" if len(chunks) == 1 else f"model{number}"
            content[key] = {local: self._shard(name, tp) for local, name in names}
        params = [[n for _, n in names if n and not is_buffer(n)] for names in chunks]
        buffers = None
        if self.common.get("optimizer") is not None:
            content["optimizer"], buffers = self._optimizers(params, tp, pp)
        states = dict(self._rank_states(tp, pp))
        first = next(iter(states.values()), {})
        if RNG_STATE in first:
            content["rng_state"] = [reference_rng(first[RNG_STATE])]
        if RERUN_STATE in first:
            content[RERUN_STATE] = {
                **reference_mode(),
                "sharded": reference_rerun(first[RERUN_STATE]),
                RANKS: {r: state[RERUN_STATE] for r, state in states.items()},
            }
        yield MODEL_FILE, content
        if buffers is not None:
            yield BUFFER_FILE, buffers

    def _num_chunks(self) -> int:
        return int(self.args.get("virtual_pipeline_model_parallel_size") or 1)

    def _names(self, pp: int, chunk: int, experts: range) -> Iterator[tuple[str, str]]:
        """Yield local name and global name of a chunk's tensors, in the order of the model.

        The global name is empty for an ``_extra_state`` entry, which has no tensor.
        """
        stage, last = chunk * self.pp + pp, self._num_chunks() * self.pp - 1
        yield from ordered_names(
            self.reader.tensors,
            self.args,
            experts=experts,
            layers=self._layers(stage, last + 1),
            is_first=stage == 0,
            is_last=stage == last,
        )

    def _layers(self, stage: int, num_stages: int) -> Sequence[int]:
        """Return the layers of a virtual stage: as in the run, else equally many on each stage."""
        found = {layer[1] for layer in map(split_layer, self.reader.tensors) if layer}
        if num_stages == 1:
            return sorted(found)
        given: list[list[int]] | None = self.common.get("stages")
        if given:
            return given[stage]
        if len(found) % num_stages:
            raise CheckpointError(f"{len(found)} layers cannot be split over {num_stages} stages")
        size = len(found) // num_stages
        return range(stage * size, (stage + 1) * size)

    def _shard(self, name: str, tp: int, prefix: str = "") -> Tensor | None:
        """Return the shard of a tensor-parallel rank."""
        if not name:
            return None
        stored = self.reader.tensors[prefix + name]
        dim, blocks = sharding_of(name, self.args)
        count = expert_tensor_degree(self.args) if is_expert(name) else self.tp
        shape = list(stored.shape)
        if dim is None:
            return self.reader.read(prefix + name)
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
            self.reader.read_box(prefix + name, offset, view)
        return out

    def _state(self, tp: int, kind: str, name: str) -> Tensor:
        """Return optimizer state; fp32 weights are their own main parameters."""
        prefix = f"{STATE_PREFIX}{kind}."
        is_stored = prefix + name in self.reader.tensors
        shard = self._shard(name, tp, prefix if is_stored else "")
        assert shard is not None
        return shard

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
    ) -> tuple[StateDict, _Buffers | None]:
        common, stored = self.common, self.reader.tensors
        params = [(name, len(stored[name].shape)) for names in chunks for name in names]
        if is_distributed(common):
            known = param_groups(common, with_step=True)
            groups = [group for group, _ in numbered_groups(known, params, self.args)]
            for group in groups:
                del group["params"]
            state = {"optimizer": {"param_groups": groups}, **grad_scaler(common)}
            return state, self._buffers(chunks, tp, pp, of_experts)
        kinds = {key.removeprefix(STATE_PREFIX).split(".")[0] for key in stored}
        kinds &= {"exp_avg", "exp_avg_sq", "momentum_buffer"}
        shard = partial(self._state, tp)
        return numbered_optimizer(common, params, kinds, shard), None

    def _buffers(self, chunks: list[list[str]], tp: int, pp: int, of_experts: bool) -> _Buffers:
        is_tied = OUTPUT not in self.reader.tensors and self.pp > 1
        buffers: _Buffers = {"buckets_coalesced": True}
        for number, names in enumerate(names for names in chunks if names):
            mains = {name: self._state(tp, "fp32_param", name) for name in names}
            numels = [mains[name].numel() for name in names]
            size, alignment, replicas = bucket_rules(
                self.args,
                num_params=sum(numels),
                is_first=pp == 0 and number == 0,
                is_expert=of_experts,
            )
            alone = [i for i, name in enumerate(names) if is_tied and is_vocabulary(name)]
            starts, total = starts_in_buffer(numels, size, alone, alignment, replicas)
            entry: dict[str, Tensor] = {}
            for key, kind in BUFFER_KINDS.items():
                flat = torch.zeros(total)
                for name, start in zip(names, starts, strict=True):
                    values = mains[name] if key == "param" else self._state(tp, kind, name)
                    flat[start : start + values.numel()] = values.reshape(-1)
                entry[key] = flat
            dtype = self.reader.tensors[names[0]].dtype
            in_fp32 = any(map(self.args.get, ("accumulate_allreduce_grads_in_fp32", "bf16")))
            grads = torch.float32 if in_fp32 else dtype
            buffers[number] = {(dtype, grads): {**entry, "numel_unpadded": total}}
        return buffers

    def _rank_states(self, tp: int, pp: int) -> Iterator[tuple[int, JsonObject]]:
        """Yield the global ranks of (tp, pp) and their states.

        Only the first one, unless the state of reruns is saved, of which every rank has its own.
        """
        layout = self.reader.manifest.layout
        if not layout:
            return
        grid = RankGrid(dict(layout["dense"]))
        for rank in range(int(layout["world_size"])):
            at = grid.coordinate(rank)
            if (at["tp"], at["pp"]) == (tp, pp) and (state := self.reader.rank_state(rank)):
                yield rank, state
                if RERUN_STATE not in state:
                    return
