"""Build RETRO, its datasets and its batch table from a RunConfig.

A sample is that of a GPT, with the neighbors of each of its n chunks: neighbor_tokens [n, k, r].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from megatron.core.datasets.retro.retro_dataset import get_retro_datasets
from megatron.core.models.gpt.gpt_layer_specs import LOCAL, transformer_engine_parts
from megatron.core.models.retro import RetroConfig, RetroModel
from megatron.core.models.retro.attention import retro_block_of
from megatron.training.config.retro import RetroFlags
from megatron.training.config.run import RunConfig
from megatron.training.models.gpt import GPT, gpt_batch
from megatron.training.models.kind import Batch, BatchTable, TensorSpec, language_arguments

_TOKENS = "neighbor_tokens"


def retro_config(config: RunConfig) -> RetroConfig:
    """Return the config of the layers: that of a GPT, and the flags of RETRO."""
    flags = config.retro
    names = (f.name for f in fields(RetroConfig) if hasattr(flags, f.name))
    own = {name: getattr(flags, name) for name in names}
    return RetroConfig.unchecked(
        **{f.name: getattr(config.model, f.name) for f in fields(config.model)},
        retro_encoder_num_layers=flags.retro_encoder_layers,
        **{**own, "retro_attention_gate": gate_of(flags)},
    )


def gate_of(flags: RetroFlags) -> float:
    """Return the factor of what tokens read from neighbors; without a retriever they read none."""
    return flags.retro_attention_gate if flags.retro_add_retriever else 0.0


def build_retro_model(
    config: RunConfig, *, vp_stage: int | None = None, **stage: Any
) -> RetroModel:
    """Build one pipeline stage of RETRO on the current device."""
    model = retro_config(config)
    is_local = model.transformer_impl == "local"
    parts = LOCAL if is_local else transformer_engine_parts(model)
    return RetroModel(
        config=model,
        transformer_layer_spec=retro_block_of(parts, model),
        vp_stage=vp_stage,
        **language_arguments(config, **stage),
    )


def retro_batch(config: RunConfig, stage: int, num_stages: int) -> BatchTable:
    """Return the tensors that ``stage`` reads: those of a GPT, and neighbor_tokens [b, n, k, r].

    The first stage reads the neighbors, unless a gate of 0 keeps them from the tokens.
    """
    flags = config.retro
    num_chunks = config.data.seq_length // flags.retro_chunk_length
    shape = (
        config.training.micro_batch_size,
        num_chunks,
        flags.retro_num_neighbors,
        flags.retrieved_length,
    )
    is_read = stage == 0 and gate_of(flags) != 0
    neighbors = TensorSpec(torch.int64, shape) if is_read else None
    return {**gpt_batch(config, stage, num_stages), _TOKENS: neighbors}


def apply_retro(model: nn.Module, batch: Batch) -> Tensor:
    """Run one stage: return token losses [b, s] on the last stage, hidden states on the others."""
    neighbors = batch[_TOKENS]
    losses: Tensor = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        context_input_ids=None if neighbors is None else neighbors.flatten(0, 2),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return losses


class MockNeighbors(Dataset[Mapping[str, Any]]):
    """Samples of a mock dataset with random neighbors, which follow from seed and sample number."""

    def __init__(self, samples: Any, shape: tuple[int, int, int], num_tokens: int, seed: int):
        self.samples = samples
        self.shape = shape
        self.num_tokens = num_tokens
        self.seed = seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int) -> Mapping[str, Any]:
        random = np.random.default_rng((self.seed, idx))
        return {**self.samples[idx], _TOKENS: random.integers(self.num_tokens, size=self.shape)}


class Repeated(Dataset[Mapping[str, Any]]):
    """The first ``count`` samples of a dataset, again and again until there are ``length``."""

    def __init__(self, samples: Any, count: int, length: int) -> None:
        self.samples = samples
        self.count = min(count, len(samples))
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, idx: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.samples[idx % self.count]
        return found


def add_neighbors(run: Any, split: str, num_samples: int | None, dataset: Any) -> Any:
    """Return the samples of a split of ``run``, with their neighbors if tokens read them."""
    config = run.config
    flags = config.retro
    length = config.data.seq_length
    tokenizer = run.tokenizer
    num_repeated = 0
    if flags.retro_cyclic_train_iters is not None and split == "train":
        num_repeated = flags.retro_cyclic_train_iters * run.batches.full_global_batch_size
    samples = dataset
    if gate_of(flags) != 0 and config.data.mock_data:
        num_chunks = length // flags.retro_chunk_length
        shape = num_chunks, flags.retro_num_neighbors, flags.retrieved_length
        samples = MockNeighbors(dataset, shape, tokenizer.vocab_size, config.training.seed)
    elif gate_of(flags) != 0:
        count = num_repeated or num_samples
        found = get_retro_datasets(flags, {split: (dataset, count)}, length, tokenizer.eod)
        samples = next((each for each in found if each is not None), dataset)
    return Repeated(samples, num_repeated, len(dataset)) if num_repeated else samples


RETRO = replace(
    GPT, build=build_retro_model, batch=retro_batch, apply=apply_retro, wrap_dataset=add_neighbors
)
