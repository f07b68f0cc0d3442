"""Read format ``torch``, written with any layout: one file per tensor-parallel rank and stage.

    mp_rank_{tp:02d}[_{pp:03d}][_{ep:03d}]/
        model_optim_rng.pt    weights, optimizer, scheduler, random states
        distrib_optim.pt      buffers of the distributed optimizer

Names in a file are local: layers are numbered from 0 in every model chunk, experts on every rank.
The name determines how a tensor is sharded (`names.sharding_of`).  Optimizer state has no names: it
is in the order of the parameter groups (`optimizer_order`), or of the buffers (`buffers`).  With
expert parallelism, experts have a separate optimizer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import lcm
from pathlib import Path

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import Arguments, JsonObject, Nested, StateDict, Unpickled
from megatron.core.dist_checkpointing.manifest import RERUN_STATE, parsing
from megatron.core.dist_checkpointing.megatron_formats.archive import StoredArray, load_archive
from megatron.core.dist_checkpointing.megatron_formats.foreign_reader import (
    STATE_PREFIX,
    ForeignReader,
    check_args,
    degree,
    expert_tensor_degree,
)
from megatron.core.dist_checkpointing.megatron_formats.names import (
    is_before_core,
    is_buffer,
    our_name,
    split_expert,
    split_layer,
)
from megatron.core.dist_checkpointing.megatron_formats.optimizer_order import (
    Chunks,
    State,
    optimizer_state,
)
from megatron.core.dist_checkpointing.megatron_formats.rerun_values import RANKS, rerun_state_of
from megatron.core.parallel.rank_grid import RankGrid

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
        met: set[tuple[int, ...]] = set()
        for rank in sorted(self._ranks):
            with parsing(folder / folder_name(rank, self.args) / MODEL_FILE):
                self._add_rank(rank, met)
        with parsing(folder):
            self._finish()

    def _add_rank(self, rank: Rank, met: set[tuple[int, ...]]) -> None:
        """Add the tensors of ``rank``; ``met`` has the shards already added."""
        params = [
            list(self._params(rank, c, self._models[rank][c]))
            for c in range(len(self._models[rank]))
        ]
        state = [("", name, array) for chunk in params for name, array in chunk]
        trained = [[p for p in chunk if not is_buffer(p[0])] for chunk in params]
        for kind, name, array in self._optimizer_state(rank, self._ranks[rank], trained):
            state.append((f"{STATE_PREFIX}{kind}.", name, array))
        self._add_new_shards(rank, state, met)

    def _add_new_shards(
        self, rank: Rank, state: list[tuple[str, str, StoredArray]], met: set[tuple[int, ...]]
    ) -> None:
        """Add the shards that no earlier rank added: files of several ranks repeat shards.

        Expert shards repeat over tensor-parallel ranks, other shards over expert-parallel ranks.
        """
        tp, pp, ep = rank
        expert_tp = tp % expert_tensor_degree(self.args)
        is_new = {place: place not in met for place in ((tp, pp), (expert_tp, pp, ep))}
        met.update(is_new)
        for prefix, whole_name, whole in state:
            for name, array in self._experts_apart(whole_name, whole, ep):
                shard = (expert_tp, pp, ep) if split_expert(name) else (tp, pp)
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
        count = self._experts_of_rank()
        rows, columns = array.shape
        shape = (rows, columns // count) if found[2] == "1" else (rows // count, columns)
        for i in range(count):
            own = f"{found[1]}.local_experts.{ep * count + i}.linear_fc{found[2]}.weight"
            yield own, array.flat(i * shape[0] * shape[1], shape).t()

    def _experts_of_rank(self) -> int:
        return int(self.args.get("num_experts") or 0) // degree(self.args, "expert")

    def _rng_state(self, rank: int) -> Unpickled | None:
        at = self._coordinate(rank)
        ep = RankGrid(dict(self.manifest.layout["expert"])).coordinate(rank).get("ep", 0)
        states = self._ranks.get((at["tp"], at["pp"], ep), {}).get("rng_state")
        return states[at["dp"] % len(states)] if states else None

    def _rerun_state(self, rank: int) -> JsonObject | None:
        at = self._coordinate(rank)
        found = next(
            (c for (tp, pp, _), c in self._ranks.items() if (tp, pp) == (at["tp"], at["pp"])), {}
        ).get(RERUN_STATE)
        if found is None:
            return None
        own: Mapping[int, JsonObject] = found.get(RANKS, {})
        if own:
            return own.get(rank)
        # Megatron-LM saves that of the first data-parallel rank.
        return rerun_state_of(found["sharded"]) if at["dp"] == 0 else None

    def _load_ranks(self) -> dict[Rank, StateDict]:
        """Return the contents of the file of each rank."""
        ranks: dict[Rank, StateDict] = {}
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
        wanted = set(ranks_of(self.args))
        if wanted != self._ranks.keys():
            kinds = [k for k in ("tensor", "pipeline", "expert") if degree(self.args, k) > 1]
            sizes = " x ".join(
                f"--{kind}-model-parallel-size {degree(self.args, kind)}"
                for kind in kinds or ["tensor"]
            )
            raise CheckpointDamaged(
                f"{self.folder} has the files of {len(self._ranks)} ranks, it was written with "
                f"{sizes}: copy the missing mp_rank_* folders"
            )

    def _params(
        self, rank: Rank, chunk: int, model: Mapping[str, StoredArray]
    ) -> Iterator[tuple[str, StoredArray]]:
        """Yield the global name and the array of each tensor of a model chunk.

        The layers of chunk c follow those of chunk c - 1 of all stages.
        """
        stage, pp = rank[1], degree(self.args, "pipeline")
        before = Counter(
            stack
            for c in range(chunk + 1)
            for p in range(pp if c < chunk else stage)
            for stack in _stacks(self._models[0, p, 0][c])
        )
        first = rank[2] * self._experts_of_rank()
        before_core = is_before_core(model)
        for local, array in model.items():
            name = our_name(local, before_core=before_core)
            if layer := split_layer(name):
                name = f"{layer[0]}.{layer[1] + before[layer[0]]}.{layer[2]}"
            if expert := split_expert(name):
                name = f"{expert[0]}.local_experts.{expert[1] + first}.{expert[2]}"
            yield name, array

    def _optimizer_state(self, rank: Rank, content: StateDict, params: Chunks) -> list[State]:
        path = self.folder / folder_name(rank, self.args)
        if content.get("optimizer") is None:
            return []
        buffers, hint = None, f", and there is no {BUFFER_FILE}"
        if (path / BUFFER_FILE).exists():
            buffers, hint = load_archive(self._map(path / BUFFER_FILE)), ""
        what = f"{path}: the optimizer's state"
        return optimizer_state(
            what, content["optimizer"], buffers, params, self.args, rank[1], hint
        )


def _models(content: StateDict) -> list[dict[str, StoredArray]]:
    """Return the tensors of each model chunk, in model order, by their names in the file."""
    chunks = sorted(key for key in content if re.fullmatch(r"model\d+", str(key)))
    keys = ["model"] if "model" in content else chunks
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
