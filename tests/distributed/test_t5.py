"""T5 in any layout trains as in one process: losses, gradients, norms, weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.grad_buffer import gradient_of
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.pipeline_parallel import StepHooks, get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_seed
from tests.distributed.test_pipeline import Trained, shards, whole
from tests.support import selection, tolerances
from tests.support.layouts import must_agree
from tests.support.ranks import run_ranks
from tests.support.t5_models import VOCABULARY, Shape, build_t5
from tools.dev.lib.layout_axes import Case, Sizes, case_of

SOURCES, TARGETS, STEPS, MICRO_BATCHES = 12, 8, 2, 4


@dataclass(frozen=True)
class Layout:
    """How T5 is cut up, and which T5 it is."""

    pp: int = 1
    encoder_stages: int = 0
    tp: int = 1
    dp: int = 1
    shape: Shape = Shape()
    position: str = "relative"
    model: tuple[tuple[str, Any], ...] = ()
    ddp: tuple[tuple[str, Any], ...] = ()

    @property
    def alone(self) -> Layout:
        """The same training in one process."""
        return Layout(shape=self.shape, position=self.position)


def batches(step: int, dp_rank: int, dp: int) -> Iterator[tuple[Tensor, ...]]:
    """Source, target, labels, what of the source is padding, which labels count."""
    for number in range(dp_rank, MICRO_BATCHES, dp):
        generator = torch.Generator().manual_seed(100 * step + number)
        source = torch.randint(0, VOCABULARY, (2, SOURCES), generator=generator)
        target = torch.randint(0, VOCABULARY, (2, TARGETS + 1), generator=generator)
        padding = torch.arange(SOURCES) >= torch.tensor([[SOURCES], [SOURCES - 3 - number]])
        mask = torch.rand(2, TARGETS, generator=generator) < 0.7
        yield source, target[:, :-1], target[:, 1:], padding, mask.double()


def forward_step(data: Iterator[tuple[Tensor, ...]], model: Any) -> Any:
    source, target, labels, padding, mask = next(data)
    output = model(source, target, padding, None, padding, lm_labels=labels)

    def loss(output: Tensor) -> Any:
        total, number = (output * mask).sum(), mask.sum()
        return total, number.int(), float(total.detach() / number)

    return output, loss


def train(rank: int, world_size: int, layout: Layout) -> Trained:
    grids = make_grids(world_size, tp=layout.tp, pp=layout.pp)
    groups = create_process_groups(*grids, encoder_stages=layout.encoder_stages)
    model_parallel_seed(5, tp_rank=groups.tp.rank())
    torch.manual_seed(1234)
    model = build_t5(
        layout.shape,
        groups,
        layout.position,
        params_dtype=torch.float64,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        encoder_pipeline_model_parallel_size=layout.encoder_stages,
        **dict(layout.model),
    )
    ddp = DistributedDataParallelConfig(**dict(layout.ddp))
    chunk = DistributedDataParallel(model.config, ddp, model, pg_collection=groups)
    is_sharded = ddp.use_distributed_optimizer
    settings = OptimizerConfig(
        optimizer="sgd", lr=0.05, clip_grad=1.0, use_distributed_optimizer=is_sharded
    )
    optimizer = get_megatron_optimizer(settings, [chunk], pg_collection=groups)
    out = Trained()
    for step in range(STEPS):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(step, groups.dp.rank(), layout.dp),
            model=chunk,
            num_microbatches=MICRO_BATCHES // layout.dp,
            seq_length=SOURCES,
            decoder_seq_length=TARGETS,
            micro_batch_size=2,
            pg_collection=groups,
            hooks=StepHooks(finalize_model_grads_func=finalize_model_grads),
        )
        out.losses.append(reported)
        if not is_sharded:  # there a rank has its parts alone
            out.gradients.append(shards([chunk], lambda p: gradient_of(p).clone()))
        out.norms.append(optimizer.step()[1])
    chunk.finish_param_sync()
    out.values = shards([chunk], lambda p: p.detach())
    return out


@functools.cache
def expected(layout: Layout) -> Trained:
    return run_ranks(train, 1, layout.alone)[0]


ZERO = (("use_distributed_optimizer", True), ("overlap_grad_reduce", True), ("bucket_size", 200))
OVERLAP = (*ZERO, ("overlap_param_gather", True))
SEQUENCE = (("sequence_parallel", True),)
FULL = (
    ("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1),
)  # fmt: skip
V11 = Shape(is_v11=True, encoder_layers=3, decoder_layers=2)

LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2-sp-v1.1": Layout(tp=2, shape=V11, model=SEQUENCE),
    "pp2": Layout(pp=2, encoder_stages=1),
    "pp3-one": Layout(pp=3, encoder_stages=1),
    "pp3-two-v1.1": Layout(pp=3, encoder_stages=2, shape=V11),
    "pp4-learned": Layout(pp=4, encoder_stages=2, position="learned_absolute"),
    "pp3-learned-v1.1": Layout(pp=3, encoder_stages=1, position="learned_absolute", shape=V11),
    "pp4-recompute": Layout(pp=4, encoder_stages=2, model=FULL),
    "pp2-tp2-sp": Layout(pp=2, encoder_stages=1, tp=2, model=SEQUENCE),
    "dp2-zero": Layout(dp=2, ddp=ZERO),
    "pp4-dp2-zero-v1.1": Layout(pp=4, encoder_stages=2, dp=2, shape=V11, ddp=OVERLAP),
    "pp4-zb-h1": Layout(pp=4, encoder_stages=2, model=(("pipeline_schedule", "zb-h1"),)),
}


DEFAULT = (
    "pp4-learned",
    "pp3-learned-v1.1",
    "pp2-tp2-sp",
    "pp4-zb-h1",
    "dp2-zero",
)  # of `make test`


@pytest.mark.feature("Layouts: T5 with encoder and decoder on different stages, to 1e-12")
@pytest.mark.parametrize("name", selection.only(DEFAULT, LAYOUTS))
def test_stages_train_as_one_process(name: str) -> None:
    layout = LAYOUTS[name]
    ranks = run_ranks(train, layout.pp * layout.tp * layout.dp, layout)
    alone, close = expected(layout.alone), tolerances.of(torch.float64)
    by_replica = [r.losses for r in ranks if r.losses[0]][:: layout.tp]
    for step in range(STEPS):
        in_turn = zip(*(replica[step] for replica in by_replica), strict=True)
        losses = [loss for turn in in_turn for loss in turn]
        torch.testing.assert_close(losses, alone.losses[step], **close)
        for rank in ranks:
            assert rank.norms[step] == pytest.approx(alone.norms[step], rel=1e-12)
        if not ranks[0].gradients:
            continue
        gradients = whole([r.gradients[step] for r in ranks])
        wanted = whole([alone.gradients[step]])
        assert gradients.keys() == wanted.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, wanted[key], **close, msg=lambda m, n=key: f"{n}: {m}"
            )
    torch.testing.assert_close(whole([r.values for r in ranks]), whole([alone.values]), **close)


def without_encoder_stages(rank: int, world_size: int) -> None:
    groups = create_process_groups(*make_grids(2, pp=2))
    with pytest.raises(ConfigError, match=r"at least one and not all .* give 1 to 1"):
        build_t5(Shape(), groups, pipeline_model_parallel_size=2)


def test_a_pipeline_needs_to_know_where_the_decoder_begins() -> None:
    run_ranks(without_encoder_stages, 2)


T5 = (
    "--model-kind t5 --decoder-num-layers 3 --decoder-seq-length 12 --num-layers 4 "
    "--position-embedding-type relative"
).split()
# Flags of the layout, the features beside them, sizes.
RUNS = {
    "fsdp": ("--use-torch-fsdp2", "dp untied rms-norm no-bias", Sizes()),
    "zero-tp-sp-pp": (
        "--encoder-pipeline-model-parallel-size 1", "zero-1 overlap-grad-reduce tp sp pp", Sizes(),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class T5Case(Case):
    """A layout of T5; micro-batches differ in how many tokens bear a loss."""

    flags: str = ""

    def command(self) -> list[str]:
        return [*super().command(), *T5, *self.flags.split()]

    def command_alone(self) -> list[str]:
        return [*super().command_alone(), *T5]


@pytest.mark.feature("Layouts: T5 under FSDP, ZeRO-1, tensor and pipeline parallelism at once")
@pytest.mark.parametrize("name", selection.only(["fsdp"], RUNS))
def test_a_run_gives_the_answer_of_one_process(name: str) -> None:
    flags, features, sizes = RUNS[name]
    case = case_of([*features.split(), "per-token-loss"], sizes)
    must_agree(T5Case(case.features, sizes, flags))
