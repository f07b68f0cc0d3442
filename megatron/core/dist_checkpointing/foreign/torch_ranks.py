"""Reads format ``torch``: a file per tensor-parallel rank and pipeline stage, in any layout.

    mp_rank_{tp:02d}[_{pp:03d}]/model_optim_rng.pt    weights, optimizer, scheduler, random states
    mp_rank_{tp:02d}[_{pp:03d}]/distrib_optim.pt      buffers of the distributed optimizer

Names in a file are local: layers count from 0 in every model chunk.  What a rank holds of the whole
follows from the name (`names.cut_of`).  The optimizer's state has no names: it comes in the order
of its parameter groups (`optimizer_order`), or of the buffers (`buffers`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.foreign.archive import StoredArray, load_archive
from megatron.core.dist_checkpointing.foreign.foreign_reader import (
    STATE_PREFIX,
    ForeignPiece,
    ForeignReader,
    degree,
    rng_state_of,
)
from megatron.core.dist_checkpointing.foreign.names import OUTPUT, cut_of, our_name, split_layer
from megatron.core.dist_checkpointing.foreign.optimizer_order import Chunks, optimizer_state
from megatron.core.dist_checkpointing.foreign.qkv import in_our_order
from megatron.core.dist_checkpointing.manifest import CheckpointDamaged
from megatron.core.param_info import ParamInfo

MODEL_FILE = "model_optim_rng.pt"
BUFFER_FILE = "distrib_optim.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
GATED = ("swiglu", "geglu", "gated_linear_unit")

Rank = tuple[int, int]  # tensor-parallel rank, pipeline stage


class TorchRanksReader(ForeignReader):
    """A folder of format torch."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        super().__init__(folder, verify=verify)
        self._ranks = self._load_ranks()
        self.values = self._ranks[0, 0]
        self._tp, self._pp = degree(self.args, "tensor"), degree(self.args, "pipeline")
        self._check_complete()
        self._models = {rank: _models(content) for rank, content in self._ranks.items()}
        self._is_gated = any(self.args.get(flag) for flag in GATED)
        for rank, content in self._ranks.items():
            chunks = [self._global_names(rank[1], c) for c in range(len(self._models[rank]))]
            models = list(zip(chunks, self._models[rank], strict=True))
            for names, model in models:
                for local, array in model.items():
                    self._place("", names[local], rank, array)
            params = [[(names[n], model[n]) for n in model] for names, model in models]
            for kind, name, array in self._optimizer_state(rank, content, params):
                self._place(f"{STATE_PREFIX}{kind}.", name, rank, array)
        self._finish()

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        if not self.manifest.layout:
            return None
        at = self._coordinate(rank)
        states = self._ranks[at["tp"], at["pp"]].get("rng_state")
        return {"rng_state": rng_state_of(states[at["dp"] % len(states)])} if states else None

    def _load_ranks(self) -> dict[Rank, dict[str, Any]]:
        """What the file of each rank holds."""
        ranks: dict[Rank, dict[str, Any]] = {}
        for path in sorted(self.folder.glob("mp_rank_*")):
            found = _FOLDER.fullmatch(path.name)
            if found is None:
                raise CheckpointError(
                    f"{path} is of a run with expert parallelism, which format torch is not read "
                    "of: convert it to torch_dist with Megatron-LM"
                )
            content = load_archive(self._map(path / MODEL_FILE))
            if not isinstance(content, dict) or not _models(content):
                raise CheckpointError(f"{path / MODEL_FILE} holds no model")
            ranks[int(found[1]), int(found[2] or 0)] = content
        if (0, 0) not in ranks:
            raise CheckpointDamaged(f"{self.folder / 'mp_rank_00'} is missing")
        return ranks

    def _check_complete(self) -> None:
        wanted = {(tp, pp) for tp in range(self._tp) for pp in range(self._pp)}
        if wanted != self._ranks.keys():
            raise CheckpointDamaged(
                f"{self.folder} has the files of {len(self._ranks)} ranks, it was written with "
                f"--tensor-model-parallel-size {self._tp} x "
                f"--pipeline-model-parallel-size {self._pp}: copy the missing mp_rank_* folders"
            )

    def _global_names(self, stage: int, chunk: int) -> dict[str, str]:
        """Local name -> name in the whole model.  Chunk c of stage p comes behind all c-1."""
        before = sum(
            _num_layers(self._models[0, p][c])
            for c in range(chunk + 1)
            for p in range(self._pp if c < chunk else stage)
        )
        names = {}
        for local in self._models[0, stage][chunk]:
            layer = split_layer(our_name(local))
            names[local] = (
                f"{layer[0]}.{layer[1] + before}.{layer[2]}" if layer else our_name(local)
            )
        return names

    def _optimizer_state(
        self, rank: Rank, content: Mapping[str, Any], params: Chunks
    ) -> Iterator[tuple[str, str, StoredArray]]:
        path = self.folder / folder_name(rank, self._pp)
        if content.get("optimizer") is None:
            return iter(())
        buffers = None
        if (path / BUFFER_FILE).exists():
            buffers = load_archive(self._map(path / BUFFER_FILE))
        try:
            return iter(
                list(optimizer_state(content["optimizer"], buffers, params, self.args, rank[1]))
            )
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: the optimizer's state does not fit the model beside it ({error}); "
                "--no-load-optim does without"
            ) from None

    def _place(self, prefix: str, name: str, rank: Rank, array: StoredArray) -> None:
        """Take over what ``rank`` holds of a tensor, if no other rank gives the same."""
        is_copy = name == OUTPUT and not self.args.get("untie_embeddings_and_output_weights")
        dim, num_blocks = cut_of(name, is_gated=self._is_gated)
        if is_copy or (dim is None and rank[0] > 0):
            return
        shape = list(array.shape)
        if dim is not None:
            shape[dim] *= self._tp
        info = ParamInfo(
            global_shape=tuple(shape),
            shard_dim=dim,
            shard_index=rank[0],
            shard_count=1 if dim is None else self._tp,
            num_blocks=num_blocks,
        )
        if not shape:
            self._add_rows(prefix + name, (), array)
        for local, whole in info.slices(array.shape):
            box = [slice(0, n) for n in array.shape]
            box[dim or 0] = local
            offset = [0] * len(shape)
            offset[dim or 0] = whole.start
            self._add_rows(prefix + name, tuple(offset), array.narrow(*box))

    def _add_rows(self, key: str, offset: tuple[int, ...], array: StoredArray) -> None:
        version = float(self.values.get("checkpoint_version", 0))
        heads = int(self.args.get("num_attention_heads") or 1) // self._tp
        if "linear_qkv" not in key:
            version = 3.0
        for row, rows in in_our_order(array, version, heads):
            at = (offset[0] + row, *offset[1:]) if offset else offset
            self._add(key, array.dtype, ForeignPiece(at, rows.shape, partial(_same, rows)))


def _models(content: Mapping[str, Any]) -> list[dict[str, StoredArray]]:
    """The tensors of each model chunk under their names in the file, in the order of the model."""
    keys = ["model"] if "model" in content else sorted(k for k in content if _is_chunk(k))
    return [dict(_leaves(content[key])) for key in keys]


def _is_chunk(key: object) -> bool:
    return isinstance(key, str) and re.fullmatch(r"model\d+", key) is not None


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, StoredArray]]:
    """Tensors of nested dictionaries; models before core are made of such."""
    for name, value in tree.items():
        if isinstance(value, StoredArray) and not name.endswith("_extra_state"):
            yield prefix + name, value
        elif isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")


def _num_layers(model: Mapping[str, StoredArray]) -> int:
    layers = (split_layer(our_name(name)) for name in model)
    return len({layer[:2] for layer in layers if layer})


def folder_name(rank: Rank, num_stages: int) -> str:
    """The folder of a rank."""
    return f"mp_rank_{rank[0]:02d}" + (f"_{rank[1]:03d}" if num_stages > 1 else "")


def _same(array: StoredArray) -> StoredArray:
    return array
