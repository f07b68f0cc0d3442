"""An engine whose ranks all make the same calls, as scripts written for Megatron-LM do.

Every rank of a replica adds the same requests and calls `advance` as often as the others; its first
rank schedules, and all ranks return the same outputs.  Replicas are independent of each other,
unless experts are distributed over them: then the ranks of all replicas make the same calls.

The model belongs to the script, which may train it while no request is unfinished: the matmuls of
generation are bound to it, and its sequence parallelism is switched off, in `advance` only, and a
request that finds the engine empty shares no prefix with earlier ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

from torch import nn

from megatron.core.device import is_cuda
from megatron.core.inference.fast_linear import FastLinears
from megatron.core.inference.paged_engine.engine import Engine, EngineOptions
from megatron.core.inference.paged_engine.request import (
    Request,
    RequestOutput,
)
from megatron.core.inference.paged_engine.runner import GenerationModel
from megatron.core.inference.paged_engine.step_plan import array_to_text, text_to_array
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.parallel.rank_grid import RankGrid
from megatron.core.transformer.transformer_config import TransformerConfig

# An output of a request in one step, and the seconds that the step took.
TimedOutput: TypeAlias = tuple[RequestOutput, float]


class CollectiveEngine(Engine):
    """An `Engine` with `add`, `abort` and `advance` on every rank.

    Construction is collective over the ranks of all replicas.
    """

    def __init__(self, model: GenerationModel, options: EngineOptions) -> None:
        groups = _groups_of_replica(model.groups)
        peers = None
        if groups is not model.groups and groups.world.size() < model.groups.world.size():
            peers = model.groups.dense_grid.groups("tp", "pp")
        self._sequences = ReplicatedSequences(model.module)
        with self._sequences.bound():
            super().__init__(replace(model, groups=groups), options, peers)
        self._is_root = self.model.groups.world.rank() == 0
        self._linears = None if is_cuda(self.model.device) else FastLinears(self.model.module)
        self.unfinished: set[str] = set()  # requests that wait or run
        self._begun: set[str] = set()  # unfinished requests that have a token

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.unfinished)

    @property
    def is_decode_only(self) -> bool:
        """Whether all unfinished requests, of which there are some, have a token."""
        return bool(self.unfinished) and self.unfinished == self._begun

    def add(self, request: Request) -> None:
        """Queue a request.  Raises RequestError on every rank if it can never run."""
        self.check(request)
        if self._is_root:
            if not self.unfinished:
                self._start_anew()  # the weights may have changed
            super().add(request)
        self.unfinished.add(request.request_id)

    def abort(self, request_id: str) -> bool:
        """End a request without further output; return whether it was there."""
        if self._is_root:
            super().abort(request_id)
        was_there = request_id in self.unfinished
        self.unfinished.discard(request_id)
        self._begun.discard(request_id)
        return was_there

    def advance(self, *, to_end: bool) -> list[TimedOutput]:
        """Run one step of each lane, or all requests ``to_end``; return the outputs.

        Collective over the ranks of the engine.
        """
        self.model.module.eval()
        linears = nullcontext() if self._linears is None else self._linears.bound()
        with linears, self._sequences.bound():
            found = self._advance(to_end=to_end)
        ended = {output.request_id for output, _ in found if output.finish_reason is not None}
        self.unfinished -= ended
        self._begun |= {output.request_id for output, _ in found if output.new}
        self._begun -= ended
        return found

    def _advance(self, *, to_end: bool) -> list[TimedOutput]:
        if self._is_root:
            found: list[TimedOutput] = []
            while super().has_unfinished:
                found += self._timed_steps(1 if to_end else self._num_lanes)
                if not to_end:
                    break
            self.close()
            items = [[output.to_json(), elapsed_s] for output, elapsed_s in found]
            message = text_to_array(json.dumps(items))
            for rank in self._channel.ranks[1:]:
                self._channel.send(message, rank)
            self._channel.flush()
        else:
            self.follow()
            text = array_to_text(self._channel.receive(self._channel.root))
            found = [(RequestOutput.from_json(o), s) for o, s in json.loads(text)]
        return found

    def _timed_steps(self, count: int) -> list[TimedOutput]:
        """Run ``count`` steps; if it is one for each lane, wait for all of them."""
        start = time.perf_counter()
        outputs = [output for _ in range(count) for output in self.step()]
        if count == self._num_lanes:
            self._finish_steps(drain=False)
            outputs += self._held
            self._held = []
        elapsed = time.perf_counter() - start
        return [(output, elapsed) for output in outputs]


def _groups_of_replica(groups: ProcessGroupCollection) -> ProcessGroupCollection:
    """Return the groups of this rank's copy of the model alone; all groups with expert parallelism.

    Creates no group.
    """
    if groups.ep.size() > 1:
        return groups
    grid = RankGrid({"tp": groups.tp.size(), "dp": 1, "pp": groups.pp.size()})
    alone = groups.ep
    return ProcessGroupCollection(
        tp=groups.tp,
        pp=groups.pp,
        cp=groups.cp,
        ep=alone,
        dp=alone,
        mp=groups.mp,
        world=groups.mp,
        dense_grid=grid,
        expert_grid=grid,
        _alone=alone,
    )


# Attributes of layers that decide whether a rank holds a part of the sequence, and their values
# for complete sequences.
_REPLICATED = {
    "sequence_parallel": False,
    "is_sequence_sharded": False,
    "reduce_scatter_embeddings": False,
    "overlapped": None,
}


class ReplicatedSequences:
    """The layers of ``model`` that shard sequences; none if it has no sequence parallelism."""

    def __init__(self, model: nn.Module) -> None:
        self._sharded: list[tuple[dict[str, Any], dict[str, Any]]] = []
        configs: dict[int, TransformerConfig] = {}
        for module in model.modules():
            attributes = vars(module)
            changes: dict[str, Any] = {
                name: value for name, value in _REPLICATED.items() if attributes.get(name)
            }
            config = attributes.get("config")
            if isinstance(config, TransformerConfig) and config.sequence_parallel:
                if id(config) not in configs:
                    configs[id(config)] = replace(config, sequence_parallel=False)
                changes["config"] = configs[id(config)]
            # Transformer Engine's module is not registered as a submodule of its layer.
            inner = getattr(attributes.get("engine"), "module", None)
            if isinstance(inner, nn.Module) and vars(inner).get("sequence_parallel"):
                self._sharded.append((vars(inner), {"sequence_parallel": False}))
            if changes:
                self._sharded.append((attributes, changes))

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let every rank compute complete sequences until the context ends."""
        before = [{name: held[name] for name in changes} for held, changes in self._sharded]
        for held, changes in self._sharded:
            held.update(changes)
        try:
            yield
        finally:
            for (held, _), values in zip(self._sharded, before, strict=True):
                held.update(values)
