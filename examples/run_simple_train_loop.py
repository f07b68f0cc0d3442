"""Train a GPT with the library alone: model, optimizer and training loop in one script.

    python examples/run_simple_train_loop.py
    torchrun --nproc-per-node 2 examples/run_simple_train_loop.py --tensor-model-parallel-size 2

Trains a tiny GPT on mock data, saves nothing, and prints a loss for each step.  Order of
collectives in a step: those of tensor parallelism in forward and backward, then one all-reduce of
gradients over the data-parallel ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # installed or not

from megatron.core import device, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.microbatch import StepHooks
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

VOCAB_SIZE = 128
SEQ_LENGTH = 64
MICRO_BATCH_SIZE = 4
NUM_MICROBATCHES = 2


class Numbers:
    """Attributes of a tokenizer that a dataset reads; mock data already consists of ids."""

    vocab_size = VOCAB_SIZE
    eod = VOCAB_SIZE - 1
    pad = -1
    unique_identifiers = {"class": "Numbers"}


def main(argv: list[str] | None = None) -> list[float]:
    """Set up, build and train; return the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--train-iters", type=int, default=20)
    options = parser.parse_args(argv)
    start(options.tensor_model_parallel_size)
    losses = train(options.train_iters, options.tensor_model_parallel_size)
    dist.destroy_process_group()
    return losses


def start(tp: int) -> None:
    """Choose the device, initialize the process group and the parallel groups, and seed."""
    device.choose("auto", int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(device.default_backend())
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(123)


def build_model(tp: int) -> DistributedDataParallel:
    """Build a GPT of two layers, whose gradients are summed over the data-parallel ranks."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(config=config), VOCAB_SIZE, SEQ_LENGTH)
    model.to(device.current())
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def batches() -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches of this data-parallel rank, without end."""
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQ_LENGTH,
        path_to_cache=tempfile.gettempdir(),
        create_attention_mask=False,
        tokenizer=Numbers(),
    )
    builder = BlendedMegatronDatasetBuilder(MockGPTDataset, [1000, 0, 0], lambda: True, config)
    dataset: Any = builder.build()[0]
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset,
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_data_parallel_rank(),
        shuffle=False,
    )
    loader = DataLoader(dataset, MICRO_BATCH_SIZE, sampler=sampler, drop_last=True)
    while True:
        for batch in loader:
            yield {key: value.to(device.current()) for key, value in batch.items()}


def forward_step(data: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Return the losses [b, s] of a micro-batch, and the function that averages them."""
    batch = next(data)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(mean_loss, batch["loss_mask"])


def mean_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss over the tokens of the loss mask, and the values to report."""
    loss = (losses * loss_mask).sum() / loss_mask.sum()
    return loss, {"lm loss": loss.detach()}


def train(train_iters: int, tp: int) -> list[float]:
    """Train: each iteration computes gradients of `NUM_MICROBATCHES` and updates once."""
    model = build_model(tp)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [model])
    forward_backward = get_forward_backward_func()
    hooks = StepHooks(finalize_model_grads_func=finalize_model_grads)
    data, losses = batches(), []
    for iteration in range(1, train_iters + 1):
        model.zero_grad_buffer()
        reported = forward_backward(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            hooks=hooks,
        )
        optimizer.step()
        loss = torch.stack([r["lm loss"] for r in reported]).mean()
        losses.append(float(loss))
        if dist.get_rank() == 0:
            print(f"iteration {iteration}: loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
