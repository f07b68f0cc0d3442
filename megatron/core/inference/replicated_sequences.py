"""Sequence parallelism of a model, switched off while the model generates.

A step of generation has a few tokens, which tensor-parallel ranks cannot shard: every rank computes
all of them, as without --sequence-parallel.  The parameters are the same in both cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from megatron.core.transformer.transformer_config import TransformerConfig

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
            # Transformer Engine's module is no submodule of its layer.
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
