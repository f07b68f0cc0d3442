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
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

from torch import nn

from megatron.core.device import is_cuda
from megatron.core.inference.fast_linear import FastLinear
from megatron.core.inference.paged_engine.engine import Engine, EngineOptions
from megatron.core.inference.paged_engine.request import Request, RequestOutput
from megatron.core.inference.paged_engine.runner import GenerationModel
from megatron.core.inference.paged_engine.step_plan import array_to_text, text_to_array
from megatron.core.inference.v014.requests import RunningRequest
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.parallel.rank_grid import RankGrid
from megatron.core.tensor_parallel.layers import Linear
from megatron.core.transformer.transformer_config import TransformerConfig


class CollectiveEngine(Engine):
    """An `Engine` with `add`, `abort` and `advance` on every rank.

    Construction is collective over the ranks of all replicas.
    """

    def __init__(self, model: GenerationModel, options: EngineOptions) -> None:
        groups = _groups_of_replica(model.groups)
        peers = None
        if groups is not model.groups and groups.world.size() < model.groups.world.size():
            peers = model.groups.dense_grid.groups("tp", "pp")
        self._changes = replicated_sequences(model.module)
        with changed(self._changes):
            super().__init__(replace(model, groups=groups), options, peers)
        self._is_root = groups.world.rank() == 0
        if not is_cuda(model.device):
            self._changes += [
                (vars(module), {"quantizer": FastLinear("fp32", batch_invariant=False)})
                for module in model.module.modules()
                if isinstance(module, Linear) and module.quantizer is None
            ]
        self.running: dict[str, RunningRequest] = {}  # by id, whether they wait or run

    def add(self, request: Request) -> None:
        """Queue a request, which the caller enters in ``running``.

        Raises RequestError on every rank if it can never run.
        """
        self.check(request)
        if self._is_root:
            if not self.running:
                self._start_anew()  # the weights may have changed
            super().add(request)

    def abort(self, request_id: str) -> bool:
        """End a request without further output; return, on the root, whether it was there."""
        self.running.pop(request_id, None)
        return self._is_root and super().abort(request_id)

    def advance(self, *, to_end: bool) -> list[tuple[RunningRequest, RequestOutput]]:
        """Run one step of each lane, or all requests ``to_end``; return the outputs of requests.

        Collective over the ranks of the engine.
        """
        self.model.module.eval()
        with changed(self._changes):
            if self._is_root:
                items = self._steps(to_end)
                self.close()
                self._tell_others(text_to_array(json.dumps(items)))
                self._channel.flush()
            else:
                self.follow()
                items = json.loads(array_to_text(self._channel.receive(self._channel.root)))
        found = []
        for item, elapsed_s in items:
            output = RequestOutput.from_json(item)
            running = self.running[output.request_id]
            running.outputs.append((output, elapsed_s))
            found.append((running, output))
            if output.finish_reason is not None:
                del self.running[output.request_id]
        return found

    def _steps(self, to_end: bool) -> list[tuple[RequestOutput, float]]:
        """Run steps on the root; return their outputs, with the seconds of each."""
        items = []
        while self.has_unfinished:
            start = time.perf_counter()
            outputs = [o for _ in range(1 if to_end else self._num_lanes) for o in self.step()]
            if not to_end:
                self._finish_steps()
                outputs += self._held
                self._held = []
            elapsed_s = time.perf_counter() - start
            items += [(output, elapsed_s) for output in outputs]
            if not to_end:
                break
        return items


def _groups_of_replica(groups: ProcessGroupCollection) -> ProcessGroupCollection:
    """Return the groups of this rank's copy of the model alone; all groups with expert parallelism.

    Creates no group.
    """
    if groups.ep.size() > 1:
        return groups
    grid = RankGrid({"tp": groups.tp.size(), "dp": 1, "pp": groups.pp.size()})
    return ProcessGroupCollection(
        tp=groups.tp,
        pp=groups.pp,
        cp=groups.cp,
        dp=groups.ep,
        mp=groups.mp,
        world=groups.mp,
        dense_grid=grid,
        expert_grid=grid,
        _alone=groups.ep,
    )


# Attributes of layers that decide whether a rank holds a part of the sequence, and their values
# for complete sequences.
_REPLICATED = {
    "sequence_parallel": False,
    "is_sequence_sharded": False,
    "reduce_scatter_embeddings": False,
    "overlapped": None,
}
# Attributes of objects (their ``vars``), and other values for them.
Changes: TypeAlias = list[tuple[dict[str, Any], dict[str, Any]]]


def replicated_sequences(model: nn.Module) -> Changes:
    """Return the changes with which every rank computes complete sequences."""
    found: Changes = []
    configs: dict[int, TransformerConfig] = {}
    for module in model.modules():
        attributes = vars(module)
        changes: dict[str, Any] = {k: v for k, v in _REPLICATED.items() if attributes.get(k)}
        config = attributes.get("config")
        if isinstance(config, TransformerConfig) and config.sequence_parallel:
            if id(config) not in configs:
                configs[id(config)] = config.changed(sequence_parallel=False)
            changes["config"] = configs[id(config)]
        found.append((attributes, changes))
        # Transformer Engine's module is not registered as a submodule of its layer.
        inner = getattr(attributes.get("engine"), "module", None)
        if isinstance(inner, nn.Module) and vars(inner).get("sequence_parallel"):
            found.append((vars(inner), {"sequence_parallel": False}))
    return [(attributes, changes) for attributes, changes in found if changes]


@contextmanager
def changed(changes: Changes) -> Iterator[None]:
    """Make ``changes`` until the context ends."""
    before = [{name: held[name] for name in new} for held, new in changes]
    for held, new in changes:
        held.update(new)
    try:
        yield
    finally:
        for (held, _), values in zip(changes, before, strict=True):
            held.update(values)
