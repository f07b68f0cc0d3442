"""A user's script written for Megatron Core v0.14: train, save, load.  No name of ours in it.

    torchrun --nproc-per-node 2 tests/support/user_simple_loop.py FOLDER [TP [PP]]

It calls the library as v0.14's ``run_simple_mcore_train_loop.py`` does; device and backend are
those of the machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Adam
from torch.utils.data import DataLoader

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import compile_helpers
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.tokenizer.tokenizer import _NullTokenizer

_SEQUENCE_LENGTH = 64
_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def initialize_distributed(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1
) -> None:
    parallel_state.destroy_model_parallel()
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    if _DEVICE.type == "cuda":
        torch.cuda.set_device(local_rank)
    backend = "nccl" if _DEVICE.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend=backend, rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size, pipeline_model_parallel_size
    )


def model_provider(**changes: Any) -> GPTModel:
    transformer_config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        **changes,
    )
    return GPTModel(
        config=transformer_config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=100,
        max_sequence_length=_SEQUENCE_LENGTH,
    )


def get_train_data_iterator() -> Iterator[Any]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        if torch.distributed.get_rank() == 0:
            compile_helpers()
        torch.distributed.barrier()
    else:
        compile_helpers()
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=_SEQUENCE_LENGTH,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=_NullTokenizer(vocab_size=_SEQUENCE_LENGTH),
        mid_level_dataset_surplus=0.005,
    )
    datasets = BlendedMegatronDatasetBuilder(
        MockGPTDataset, [1000, None, None], lambda: True, config
    ).build()
    return iter(DataLoader(datasets[0], batch_size=8, shuffle=True))


def forward_step_func(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
    def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> tuple[Any, Any]:
        losses = output_tensor.float()
        loss_mask = loss_mask.view(-1).float()
        loss = torch.sum(losses.view(-1) * loss_mask) / loss_mask.sum()
        return loss, {"lm loss": loss}

    data = next(data_iterator)
    output_tensor = model(
        data["tokens"].to(_DEVICE),
        data["position_ids"].to(_DEVICE),
        data["attention_mask"].to(_DEVICE),
        labels=data["labels"].to(_DEVICE),
    )
    return output_tensor, partial(loss_func, data["loss_mask"].to(_DEVICE))


def save_distributed_checkpoint(checkpoint_path: str, gpt_model: Any) -> None:
    sharded_state_dict = gpt_model.sharded_state_dict(prefix="")
    dist_checkpointing.save(sharded_state_dict=sharded_state_dict, checkpoint_dir=checkpoint_path)


def load_distributed_checkpoint(checkpoint_path: str, gpt_model: Any) -> Any:
    sharded_state_dict = gpt_model.sharded_state_dict(prefix="")
    checkpoint = dist_checkpointing.load(
        sharded_state_dict=sharded_state_dict, checkpoint_dir=checkpoint_path
    )
    gpt_model.load_state_dict(checkpoint)
    return gpt_model


def main(folder: str, tensor: int = 1, pipeline: int = 1) -> None:
    initialize_distributed(tensor, pipeline)
    model_parallel_cuda_manual_seed(123)
    gpt_model = model_provider()
    gpt_model.to(_DEVICE)
    optim = Adam(gpt_model.parameters())
    train_iterator = get_train_data_iterator()
    forward_backward_func = get_forward_backward_func()
    for _ in range(5):
        optim.zero_grad()
        losses_reduced = forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=train_iterator,
            model=gpt_model,
            num_microbatches=1,
            seq_length=_SEQUENCE_LENGTH,
            micro_batch_size=8,
            decoder_seq_length=_SEQUENCE_LENGTH,
            forward_only=False,
        )
        optim.step()
        print(f"Losses reduced :  {losses_reduced}")
    trained = {name: tensor.clone() for name, tensor in gpt_model.state_dict().items()}
    Path(folder).mkdir(exist_ok=True)
    save_distributed_checkpoint(gpt_model=gpt_model, checkpoint_path=folder)
    with torch.no_grad():
        for param in gpt_model.parameters():
            param.zero_()
    gpt_model = load_distributed_checkpoint(gpt_model=gpt_model, checkpoint_path=folder)
    gpt_model.to(_DEVICE)
    loaded = gpt_model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.items())
    print("Successfully loaded the model")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
