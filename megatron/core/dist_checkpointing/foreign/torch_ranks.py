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
from pathlib import Path
from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.foreign.archive import StoredArray, load_archive
from megatron.core.dist_checkpointing.foreign.foreign_reader import (
    STATE_PREFIX,
    ForeignReader,
    degree,
    rng_state_of,
)
from megatron.core.dist_checkpointing.foreign.names import our_name, split_layer
from megatron.core.dist_checkpointing.foreign.optimizer_order import Chunks, optimizer_state
from megatron.core.dist_checkpointing.manifest import CheckpointDamaged

MODEL_FILE = "model_optim_rng.pt"
BUFFER_FILE = "distrib_optim.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")

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
        for rank, content in self._ranks.items():
            chunks = [self._global_names(rank[1], c) for c in range(len(self._models[rank]))]
            models = list(zip(chunks, self._models[rank], strict=True))
            for names, model in models:
                for local, array in model.items():
                    self._place("", names[local], rank[0], array)
            params = [[(names[n], model[n]) for n in model] for names, model in models]
            for kind, name, array in self._optimizer_state(rank, content, params):
                self._place(f"{STATE_PREFIX}{kind}.", name, rank[0], array)
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
