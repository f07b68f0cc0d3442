"""A GPT in pipeline stages trains as it does in one process: losses, gradients, norms, weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.grad_buffer import gradient_of
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.params.param_info import ParamInfo, info_of
from megatron.core.pipeline_parallel import StepHooks, get_forward_backward_func
from megatron.core.pipeline_parallel.plan import placement_of
from megatron.core.tensor_parallel.random import model_parallel_seed
from tests.support import selection, tolerances
from tests.support.one_process import tiny_config
from tests.support.ranks import run_ranks
from tests.support.sharded import assemble

VOCABULARY, LENGTH = 37, 8
STEPS = 3


@dataclass(frozen=True)
class Layout:
    """A pipeline, and what else differs from one process."""

    pp: int = 1
    chunks: int = 1
    tp: int = 1
    dp: int = 1
    schedule: str | None = None
    microbatches: int = 8  # of the whole global batch
    is_llama: bool = False  # rotary, no biases, untied
    per_token: bool = False
    model: tuple[tuple[str, Any], ...] = ()
    ddp: tuple[tuple[str, Any], ...] = ()
    optimizer: str = "sgd"
    steps: int = STEPS
    varies: bool = False  # lengths of micro-batches differ, and stages exchange shapes

    @property
    def alone(self) -> Layout:
        """The same training in one process."""
        return Layout(
            microbatches=self.microbatches,
            is_llama=self.is_llama,
            per_token=self.per_token,
            optimizer=self.optimizer,
            steps=self.steps,
            varies=self.varies,
        )


Shards = dict[str, list[tuple[Tensor, ParamInfo]]]


@dataclass
class Trained:
    """What one rank saw of a training."""

    losses: list[list[float]] = field(default_factory=list)  # by step, of each micro-batch
    norms: list[float] = field(default_factory=list)
    zeros: list[int] = field(default_factory=list)
    gradients: list[Shards] = field(default_factory=list)
    values: Shards = field(default_factory=dict)


def build(layout: Layout, groups: Any) -> list[DistributedDataParallel]:
    config = tiny_config(
        num_layers=8,
        hidden_size=16,
        params_dtype=torch.float64,
        add_bias_linear=not layout.is_llama,
        calculate_per_token_loss=layout.per_token,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        pipeline_schedule=layout.schedule,
        variable_seq_lengths=layout.varies,
        **dict(layout.model),
    )
    placement = placement_of(layout.schedule, layout.pp, layout.chunks)
    torch.manual_seed(1234)
    chunks = []
    for chunk in range(layout.chunks):
        stage = placement.stage(groups.pp.rank(), chunk)
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(config=config),
            VOCABULARY + 3,
            LENGTH,
            pre_process=stage == 0,
            post_process=stage == placement.num_stages - 1,
            share_embeddings_and_output_weights=not layout.is_llama,
            position_embedding_type="rope" if layout.is_llama else "learned_absolute",
            pg_collection=groups,
            vp_stage=chunk if layout.chunks > 1 else None,
            unpadded_vocab_size=VOCABULARY,
        )
        ddp = DistributedDataParallelConfig(**dict(layout.ddp))
        chunks.append(DistributedDataParallel(config, ddp, model, pg_collection=groups))
    return chunks


def batches(layout: Layout, step: int, dp_rank: int) -> Iterator[dict[str, Tensor]]:
    """This replica's share of the step's micro-batches; some tokens carry no loss."""
    for number in range(dp_rank, layout.microbatches, layout.dp):
        generator = torch.Generator().manual_seed(1000 * step + number)
        length = LENGTH - 2 * (number % 3) * layout.varies
        ids = torch.randint(0, VOCABULARY, (2, length + 1), generator=generator)
        mask = torch.rand(2, length, generator=generator) < 0.7
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "mask": mask.double()}


def forward_step(data: Iterator[dict[str, Tensor]], model: Any) -> Any:
    stage, batch = model.module, dict.fromkeys(("tokens", "labels", "mask"))
    if stage.pre_process or stage.post_process:
        batch = next(data)
    output = model(
        batch["tokens"] if stage.pre_process else None,
        torch.arange(batch["tokens"].shape[1]).expand(2, -1) if stage.pre_process else None,
        None,
        labels=batch["labels"] if stage.post_process else None,
    )

    def loss(output: Tensor) -> Any:
        total, number = (output * batch["mask"]).sum(), batch["mask"].sum()
        return total, number.int(), float(total.detach() / number)

    return output, loss


def shards(chunks: list[Any], of: Any) -> Shards:
    out: Shards = {}
    for chunk in chunks:
        for param in chunk.parameters():
            out.setdefault(info_of(param).name, []).append((of(param), info_of(param)))
    return out


def train(rank: int, world_size: int, layout: Layout) -> Trained:
    groups = create_process_groups(*make_grids(world_size, tp=layout.tp, pp=layout.pp))
    model_parallel_seed(5, tp_rank=groups.tp.rank())
    chunks = build(layout, groups)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=layout.optimizer, lr=0.05, clip_grad=1.0, log_num_zeros_in_grad=True
        ),
        chunks,
        pg_collection=groups,
    )
    out = Trained()
    for step in range(layout.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[batches(layout, step, groups.dp.rank()) for _ in chunks],
            model=chunks,
            num_microbatches=layout.microbatches // layout.dp,
            seq_length=1 if layout.varies else LENGTH,
            micro_batch_size=2,
            pg_collection=groups,
            hooks=StepHooks(finalize_model_grads_func=finalize_model_grads),
        )
        out.losses.append(reported)
        out.gradients.append(shards(chunks, lambda p: gradient_of(p).clone()))
        _, norm, zeros = optimizer.step()
        out.norms.append(norm)
        out.zeros.append(zeros)
    out.values = shards(chunks, lambda p: p.detach())
    return out


@functools.cache
def expected(layout: Layout) -> Trained:
    return run_ranks(train, 1, layout.alone)[0]


def whole(ranks: list[Shards]) -> dict[str, Tensor]:
    """Global tensors; copies on several ranks or chunks must be equal to the last bit."""
    pieces: Shards = {}
    for rank in ranks:
        for name, found in rank.items():
            pieces.setdefault(name, []).extend(found)
    return {name: assemble(found, are_gradients=False) for name, found in pieces.items()}


def check(layout: Layout) -> None:
    ranks = run_ranks(train, layout.pp * layout.tp * layout.dp, layout)
    alone, close = expected(layout), tolerances.of(torch.float64)
    by_replica = [r.losses for r in ranks if r.losses[0]][:: layout.tp]
    assert len(by_replica) == layout.dp
    for step in range(layout.steps):
        # Micro-batches were dealt out in turn.
        in_turn = zip(*(replica[step] for replica in by_replica), strict=True)
        losses = [loss for turn in in_turn for loss in turn]
        torch.testing.assert_close(losses, alone.losses[step], **close)
        gradients = whole([r.gradients[step] for r in ranks])
        wanted = whole([alone.gradients[step]])
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, wanted[name], **close, msg=lambda m, n=name: f"{n}: {m}"
            )
        for rank in ranks:
            if layout.is_llama:  # the true gradient of a key's bias is zero
                assert rank.zeros[step] == alone.zeros[step] > 0
            assert rank.norms[step] == pytest.approx(alone.norms[step], rel=1e-12)
    torch.testing.assert_close(whole([r.values for r in ranks]), whole([alone.values]), **close)


DEFERRED = (("defer_embedding_wgrad_compute", True),)
OVERLAP = (("overlap_grad_reduce", True), ("bucket_size", 200))

LAYOUTS = {
    "pp2": Layout(pp=2),
    "pp4-llama": Layout(pp=4, is_llama=True, microbatches=2),
    "pp2-vpp2": Layout(pp=2, chunks=2),
    "pp4-vpp2-per-token": Layout(pp=4, chunks=2, per_token=True),
    "pp4-few": Layout(pp=4, microbatches=2),
    "pp4-vpp2-odd": Layout(pp=4, chunks=2, microbatches=5),
    "pp2-dp2-overlap": Layout(pp=2, dp=2, ddp=OVERLAP),
    "pp2-vpp2-dp2-overlap": Layout(pp=2, chunks=2, dp=2, ddp=OVERLAP),
    "pp2-dp2-unaligned-deferred": Layout(
        pp=2, dp=2, ddp=(*OVERLAP, ("align_grad_reduce", False)), model=DEFERRED
    ),
    "pp2-vpp2-dp2-deferred": Layout(
        pp=2, chunks=2, dp=2, ddp=OVERLAP, model=(*DEFERRED, ("wgrad_deferral_limit", 2))
    ),
    "pp2-tp2-sp": Layout(pp=2, tp=2, is_llama=True, model=(("sequence_parallel", True),)),
    "pp2-recompute": Layout(
        pp=2,
        model=(
            ("recompute_granularity", "full"),
            ("recompute_method", "uniform"),
            ("recompute_num_layers", 1),
        ),
    ),
    "pp3-uneven": Layout(pp=3, model=(("num_layers_in_first_pipeline_stage", 2),)),
    "pp2-vpp2-layout": Layout(
        pp=2, chunks=2, model=(("pipeline_model_parallel_layout", "E|t*5||t*3L"),)
    ),
    "pp4-zb-h1": Layout(pp=4, schedule="zb-h1"),
    "pp2-dp2-zb-h1": Layout(pp=2, dp=2, schedule="zb-h1", ddp=OVERLAP),
    "pp2-zb-h1-one-micro-batch": Layout(pp=2, microbatches=1, schedule="zb-h1"),
    "pp4-zb-v": Layout(pp=4, chunks=2, schedule="zb-v"),
    "pp2-tp2-sp-zb-v-llama": Layout(
        pp=2, chunks=2, tp=2, schedule="zb-v", is_llama=True, model=(("sequence_parallel", True),)
    ),
    "pp2-dp2-zb-v": Layout(pp=2, chunks=2, dp=2, schedule="zb-v", ddp=OVERLAP, per_token=True),
    "pp2-waiting": Layout(pp=2, chunks=2, model=(("overlap_p2p_comm", False),)),
    "pp2-early": Layout(pp=2, chunks=2, model=(("overlap_p2p_comm_warmup_flush", True),)),
    "pp2-vpp2-variable": Layout(pp=2, chunks=2, varies=True),
    "pp2-tp2-sp-zb-h1-variable": Layout(
        pp=2, tp=2, schedule="zb-h1", varies=True, model=(("sequence_parallel", True),)
    ),
}


DEFAULT = (
    "pp4-llama",
    "pp4-vpp2-odd",
    "pp2-dp2-unaligned-deferred",
    "pp2-vpp2-dp2-deferred",
    "pp2-vpp2-layout",
    "pp2-dp2-zb-h1",
    "pp2-tp2-sp-zb-v-llama",
    "pp2-waiting",
    "pp2-early",
    "pp2-vpp2-variable",
)  # of `make test`


@pytest.mark.feature("Layouts: pipeline stages train as one process, to 1e-12")
@pytest.mark.parametrize("name", selection.only(DEFAULT, LAYOUTS))
def test_stages_train_as_one_process(name: str) -> None:
    check(LAYOUTS[name])
