"""Our contender of train_cpu.py: the application's own step, from flags to `train_step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pretrain_gpt
from benchmarks.peers import ADAM, CLIP, WEIGHT_DECAY, Shape, batches, weights
from megatron.core.params.param_info import info_of
from megatron.core.rerun.state_machine import RerunDataIterator
from megatron.training.estimates.flops import num_floating_point_operations
from megatron.training.initialize import configure, start
from megatron.training.runtime import setup
from megatron.training.step.run import TrainingRun
from megatron.training.step.train_step import train_step


def flags(shape: Shape, dtype: str) -> list[str]:
    """Return the command line for this shape."""
    words = (
        f"--device cpu --num-layers {shape.layers} --hidden-size {shape.hidden} "
        f"--num-attention-heads {shape.heads} --ffn-hidden-size {shape.inner} "
        f"--seq-length {shape.seq} --max-position-embeddings {shape.seq} "
        f"--micro-batch-size {shape.batch} --global-batch-size {shape.batch} "
        f"--train-iters 1000000 --lr {ADAM['lr']} --lr-decay-style constant "
        f"--adam-beta1 {ADAM['betas'][0]} --adam-beta2 {ADAM['betas'][1]} "
        f"--weight-decay {WEIGHT_DECAY} --clip-grad {CLIP} --mock-data "
        f"--tokenizer-type NullTokenizer --vocab-size {shape.vocab - 1} "
        "--make-vocab-size-divisible-by 1 --hidden-dropout 0 --attention-dropout 0 "
        "--no-create-attention-mask-in-dataloader --eval-iters 0 --num-workers 0 "
        "--no-bias-gelu-fusion"  # exact GELU, as in the others
    )
    if shape.family == "llama":
        words += " --swiglu --normalization RMSNorm --position-embedding-type rope"
        words += " --disable-bias-linear"
    if shape.groups:
        words += f" --group-query-attention --num-query-groups {shape.groups}"
    return words.split() + (["--bf16"] if dtype == "bf16" else [])


class OurTrainer:
    """`train_step` on the common initial weights and the common tokens."""

    def __init__(self, shape: Shape, dtype: str, steps: int, *more: str):
        argv = [*flags(shape, dtype), *more]
        # No other contender has query groups.
        fill = None if shape.groups else partial(copy_weights, shape=shape)
        self.run = training_run(argv, pretrain_gpt, fill)
        self.run.data.train = endless(batches(shape, steps))

    def step(self) -> float:
        result = train_step(self.run)
        self.run.state.advance(
            result,
            num_floating_point_operations(
                self.run.config, result.batch_size, self.run.padded_vocab_size
            ),
        )
        return float(result.losses["lm loss"])


def training_run(
    argv: Sequence[str], entry: Any, fill: Callable[[nn.Module], object] | None = None
) -> TrainingRun:
    """Return the run of ``argv`` with the model of ``entry``, a script; ``fill`` sets weights."""
    context = start(configure(argv=argv))
    chunks = setup.build_model_chunks(context, entry.model_provider)
    if fill is not None:
        fill(chunks[0])
    optimizer, scheduler = setup.build_optimizer(context, chunks)
    return TrainingRun(
        **vars(context),
        model_chunks=chunks,
        forward_step_func=entry.forward_step,
        optimizer=optimizer,
        scheduler=scheduler,
    )


def endless(data: Tensor) -> RerunDataIterator:
    """Return an iterator over the batches, without end, in the form of the data loader."""
    return RerunDataIterator(_endless(data))


def _endless(data: Tensor) -> Iterator[dict[str, Tensor]]:
    s = data.size(-1) - 1
    is_pinned = data.is_pinned()
    while True:
        for batch in data:
            given = {
                "tokens": batch[:, :-1].contiguous(),
                "labels": batch[:, 1:].contiguous(),
                "loss_mask": torch.ones(len(batch), s),
                "position_ids": torch.arange(s).expand(len(batch), s).contiguous(),
            }
            # As the data loader does: else the host waits for every copy to a GPU.
            yield {k: x.pin_memory() for k, x in given.items()} if is_pinned else given


@torch.no_grad()
def copy_weights(model: nn.Module, shape: Shape) -> None:
    """Copy the common initial weights; ours interleaves query, key and value by head."""
    w = weights(shape)
    d = shape.hidden // shape.heads
    names = {
        "embedding.word_embeddings.weight": w["wte"],
        "embedding.position_embeddings.weight": w.get("wpe"),
    }
    for i in range(shape.layers):
        by_part = w[f"{i}.qkv"].view(3, shape.heads, d, shape.hidden)
        qkv = by_part.transpose(0, 1).reshape(3 * shape.hidden, shape.hidden)
        prefix = f"decoder.layers.{i}."
        names[prefix + "self_attention.linear_qkv.weight"] = qkv
        names[prefix + "self_attention.linear_proj.weight"] = w[f"{i}.proj"]
        names[prefix + "mlp.linear_fc1.weight"] = w[f"{i}.fc1"]
        names[prefix + "mlp.linear_fc2.weight"] = w[f"{i}.fc2"]
    left = {name for name, tensor in names.items() if tensor is not None}
    for param in model.parameters():
        name = info_of(param).name
        if name in left:
            param.copy_(names[name])
            left.discard(name)
        elif param.dim() > 1:
            raise KeyError(f"the common start has nothing for {name}")
    if left:
        raise KeyError(f"the model has no {sorted(left)}")
