"""What the planner says of a run is what the run allocates: real ranks against imagined ones."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import rank_local
from megatron.core.params.param_info import local_part
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.initialize import configure
from megatron.training.models.encoders import image_encoder
from megatron.training.models.registry import implementation_of
from megatron.training.planning.run_plan import plan_run
from megatron.training.planning.tracing import Tracker
from megatron.training.step.train_step import (
    clear_gradients,
    forward_backward,
    reduce_gradients,
)
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, entry_of
from tests.support.training_run import training_run

BASE = (
    "--num-layers 2 --hidden-size 64 --seq-length 64 --max-position-embeddings 64 "
    "--global-batch-size 8 --vocab-size 300"
)
ONE = {
    "plain": "",
    "half precision, unfused": "--bf16 --attention-backend unfused",
    "state in 16 bits": "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 "
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp8",
    "fused attention": "--attention-backend flash --swiglu --position-embedding-type rope",
    "recompute of attention": "--recompute-granularity selective --attention-backend unfused",
    "recompute of everything": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "recompute of some layers": "--recompute-granularity full --recompute-method block "
    "--recompute-num-layers 2",
}
EXPERTS = (
    "--num-experts 4 --disable-bias-linear --swiglu --moe-ffn-hidden-size 96 "
    "--moe-router-force-load-balancing "
)
ONE["experts"] = f"{EXPERTS} --moe-shared-expert-intermediate-size 32 --moe-latent-size 40 --bf16"
BERT = "--model-kind bert --mask-prob 0.5"  # every second token of the data below has a label
T5 = "--model-kind t5 --decoder-num-layers 2 --decoder-seq-length 32"
HYBRID = (
    "--model-kind mamba --num-layers 4 --hybrid-override-pattern M*M- --mamba-head-dim 16 "
    "--mamba-num-groups 2 --mamba-state-dim 16 --position-embedding-type none"
)
VLM = (
    "--model-kind vlm --vision-num-layers 3 --img-h 24 --img-w 24 --patch-dim 6 "
    "--vision-hidden-size 48 --vision-num-attention-heads 6 --use-tiling --use-thumbnail "
    "--max-num-tiles 2"
)
VIT = "--model-kind vit --img-h 24 --img-w 24 --patch-dim 6 --num-classes 9"
SOUND = (
    "--model-kind mimo --model-provider llava_avlm --audio-seq-length 20 --vision-num-layers 2 "
    "--img-h 24 --img-w 24 --patch-dim 6 --vision-hidden-size 48 --vision-num-attention-heads 6"
)
ONE |= {
    "image classifier": VIT,
    "BERT": BERT,
    "T5": T5,
    "hybrid": HYBRID,
    "images": VLM,
    "images and sound": SOUND,
}
ONE |= {
    "images, frozen encoder": f"{VLM} --freeze-ViT --bf16",
    "images, recomputed": f"{VLM} --recompute-vision --attention-backend unfused",
    "images, frozen but for the projector": f"{VLM} --freeze-ViT --freeze-LM",
}
ONE |= {
    "activations as codes": "--bf16 --swiglu --fp8-format hybrid",
    "activations as codes of blocks": "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
    "activations as codes of 4 bits": "--fp4-format e2m1",
    "14 bytes a parameter": "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16",
    "one moment": "--optimizer lion --use-precision-aware-optimizer --exp-avg-dtype fp8",
    "one moment of matrices": "--optimizer muon --bf16",
}
TWO = {
    "BERT, cut": f"{BERT} --tensor-model-parallel-size 2 --sequence-parallel --bf16 "
    "--vocab-size 511",
    "T5 in two halves": f"{T5} --pipeline-model-parallel-size 2 "
    "--encoder-pipeline-model-parallel-size 1",
    "hybrid, cut": f"{HYBRID} --tensor-model-parallel-size 2 --sequence-parallel",
    "experts apart": f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type "
    "alltoall --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.01 --use-distributed-optimizer "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    "experts cut": f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel "
    "--moe-token-dispatcher-type flex --recompute-granularity selective --recompute-modules "
    "moe_act --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
    "experts in the second stage": f"{EXPERTS} --pipeline-model-parallel-size 2 "
    "--moe-layer-freq [0,1] --recompute-granularity selective --recompute-modules moe",
    "experts over context ranks": f"{EXPERTS} --context-parallel-size 2 "
    "--expert-model-parallel-size 2",
    "experts, fully sharded": f"{EXPERTS} --use-torch-fsdp2 --no-gradient-accumulation-fusion",
    "experts apart, fully sharded": f"{EXPERTS} --use-torch-fsdp2 --expert-model-parallel-size 2 "
    "--no-gradient-accumulation-fusion",
    "images, tensor": f"{VLM} --tensor-model-parallel-size 2 --sequence-parallel",
    "images and sound, encoders apart": f"{SOUND} --tensor-model-parallel-size 2 --encoder-tp 1",
    "images, stages": f"{VLM} --pipeline-model-parallel-size 2",
    "images, context": f"{VLM} --context-parallel-size 2 --freeze-LM",
    "images, distributed optimizer": f"{VLM} --freeze-ViT --use-distributed-optimizer --bf16",
    "images, frozen stages": f"{VLM} --pipeline-model-parallel-size 2 --freeze-LM --freeze-ViT",
    "images, fully sharded": f"{VLM} --use-torch-fsdp2 --no-gradient-accumulation-fusion",
    "images, fully sharded and frozen": f"{VLM} --use-torch-fsdp2 "
    "--no-gradient-accumulation-fusion --freeze-LM",
    # Beside four layers it matters little what gloo has not yet let go of.
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --num-layers 4 "
    "--accumulate-allreduce-grads-in-fp32",
    "stages, tied": "--pipeline-model-parallel-size 2",
    "virtual stages": "--pipeline-model-parallel-size 2 --num-layers 4 "
    "--num-virtual-stages-per-pipeline-rank 2",
    "virtual stages, recomputed": "--pipeline-model-parallel-size 2 --num-layers 4 "
    "--num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
    "zero bubble": "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
    "tokens ahead": "--pipeline-model-parallel-size 2 --mtp-num-layers 1 "
    "--position-embedding-type rope",
    "distributed optimizer": "--use-distributed-optimizer --bf16 --overlap-grad-reduce "
    "--ddp-bucket-size 40000 --make-vocab-size-divisible-by 1",
    "distributed optimizer, whole by 16 bits": "--use-distributed-optimizer --bf16 "
    "--use-precision-aware-optimizer --exp-avg-dtype fp16",
    "matrices over replicas": "--optimizer dist_muon --swiglu",
    "weights gathered as codes": "--use-distributed-optimizer --bf16 --fp8-format hybrid "
    "--fp8-recipe tensorwise --fp8-param-gather",
    "activations as codes, gathered": "--tensor-model-parallel-size 2 --sequence-parallel --bf16 "
    "--fp8-format hybrid",
    "distributed optimizer, fp32": "--use-distributed-optimizer --optimizer sgd",
    "context": "--context-parallel-size 2",
    "fully sharded": "--use-torch-fsdp2 --no-gradient-accumulation-fusion",
    "fully sharded, uneven": "--use-torch-fsdp2 --no-gradient-accumulation-fusion "
    "--max-position-embeddings 65",
    "fully sharded, recomputed": "--use-torch-fsdp2 --no-gradient-accumulation-fusion "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "whole weights kept for backward": "--use-megatron-fsdp --no-gradient-accumulation-fusion "
    "--data-parallel-sharding-strategy optim_grads --ckpt-format fsdp_dtensor",
    "fully sharded stages": "--pipeline-model-parallel-size 2 --num-layers 4 --use-torch-fsdp2 "
    "--num-virtual-stages-per-pipeline-rank 2 --no-gradient-accumulation-fusion",
    "deferred weight gradients": "--pipeline-model-parallel-size 2 --wgrad-deferral-limit 1 "
    "--defer-embedding-wgrad-compute --accumulate-allreduce-grads-in-fp32 --bf16",
}

# Of each kind of memory and of model at least one.
DEFAULT_OF_ONE = (
    "state in 16 bits",
    "recompute of some layers",
    "experts",
    "T5",
    "hybrid",
    "images, frozen encoder",
    "activations as codes of blocks",
    "one moment of matrices",
)
DEFAULT_OF_TWO = (
    "BERT, cut",
    "experts cut",
    "experts apart, fully sharded",
    "images and sound, encoders apart",
    "images, frozen stages",
    "virtual stages, recomputed",
    "zero bubble",
    "distributed optimizer",
    "weights gathered as codes",
    "context",
    "fully sharded, uneven",
    "deferred weight gradients",
)


def allocated(rank: int, world_size: int, runs: Sequence[Sequence[str]]) -> list[dict[str, int]]:
    """Of each run: bytes that this rank holds, and the most that lived besides in a step."""
    return [_allocated(argv) for argv in runs]


def _allocated(argv: Sequence[str]) -> dict[str, int]:
    with contextlib.redirect_stdout(io.StringIO()):
        kind = configure(argv=argv).language_model.model_kind
        run = training_run(argv, entry_of(kind))
    run.data.train = [_data(run.config) for _ in run.model_chunks]
    for _ in run.optimizer.named_state():
        pass  # the state is made when it is first asked for
    state = run.optimizer.state_tensors(on_host=False)
    params = [p for chunk in run.model_chunks for p in chunk.parameters()]
    buffers = [
        b.grad_data for c in run.model_chunks for b in getattr(c, "grad_buffers", {}).values()
    ]
    tracker = Tracker([*params, *buffers, *state])
    peaks = []
    with tracker:
        for _ in range(5 if run.config.world_size > 1 else 1):
            tracker.peak = tracker.alive
            clear_gradients(run)
            losses = forward_backward(run, run.data.train, run.batches.num_microbatches(0))
            reduce_gradients(run, losses)
            own = _bytes(p.grad for p in params if p.grad is not None)
            run.optimizer.step()
            peaks.append(tracker.peak - own)
    held = _bytes(params)
    rank_local.put({})  # the next run begins as the first one did
    return {
        "weights": held,
        "gradients": _bytes(buffers) + own,
        "optimizer": _bytes([*params, *state]) - held,
        "activations": min(peaks),  # gloo's threads let go of tensors when they come to it
    }


def _data(config: Any) -> Iterator[dict[str, Tensor]]:
    table, num_stages = implementation_of(config).batch, config.placement.num_stages
    needed = {
        name: expected
        for stage in range(num_stages)
        for name, expected in table(config, stage, num_stages).items()
        if expected is not None
    }
    while True:
        batch = {n: torch.ones_like(e.largest(torch.device("cpu"))) for n, e in needed.items()}
        if "audios" in batch:
            per_row = image_encoder(config).num_embeddings, config.mimo.audio_seq_length
            batch["tokens"][:, : per_row[0]] = config.mimo.special_token_ids["images"]
            batch["tokens"][:, -per_row[1] :] = config.mimo.special_token_ids["audios"]
        elif "num_tiles" in batch:
            batch["tokens"][:, 0] = -200
            batch["num_tiles"].zero_()[:, 0] = len(batch["images"]) // len(batch["tokens"])
        if config.language_model.model_kind == "bert":
            batch["labels"][:, ::2] = -1
        yield batch


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = (local_part(t).untyped_storage() for t in tensors)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _planned(argv: Sequence[str], world_size: int) -> dict[int, dict[str, int]]:
    """The same of every rank, from the planner."""
    config, planned = resolve(parse_args(argv=argv), world_size), {}
    for rank in range(world_size):
        for stage in () if rank in planned else plan_run(config, rank).stages:
            state = stage.cost.state
            planned[stage.rank] = {
                "weights": state.parameters,
                "gradients": state.gradients,
                "optimizer": state.optimizer,
                "activations": stage.activations,
            }
    return planned


@pytest.mark.feature("Planner: bytes of weights, gradients and optimizer are those of the run")
@pytest.mark.feature("Planner: activations are those of the run, within 5 %")
@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        (1, DEFAULT_OF_ONE),
        (2, DEFAULT_OF_TWO),
        pytest.param(1, ONE, marks=pytest.mark.slow),
        pytest.param(2, TWO, marks=pytest.mark.slow),
    ],
    ids=["one", "two", "all-of-one", "all-of-two"],
)
def test_the_plan_is_what_the_run_allocates(world_size: int, layouts: Sequence[str]) -> None:
    table = ONE if world_size == 1 else TWO
    runs = {name: [*TINY, *BASE.split(), *table[name].split()] for name in layouts}
    ranks = run_ranks(allocated, world_size, list(runs.values()), timeout_s=300)
    wrong = []
    for number, (name, argv) in enumerate(runs.items()):
        for rank, planned in _planned(argv, world_size).items():
            for what, size in ranks[rank][number].items():
                tolerance = 0.05 * size if what == "activations" else 0
                if abs(planned[what] - size) > tolerance:
                    wrong.append(f"{name}, rank {rank}: {what} {planned[what]}, run {size}")
    assert not wrong, "\n".join(wrong)
