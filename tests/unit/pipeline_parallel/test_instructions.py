"""Orders of work and the transfers between them."""

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.pipeline_parallel.communication_plan import instructions
from megatron.core.pipeline_parallel.plan import (
    Placement,
    Transfer,
    TransferBatch,
    Work,
    schedule_of,
)


def test_second_of_two_ranks_sends_each_gradient_with_the_next_activation_on_its_way():
    placement, work = schedule_of("1f1b", num_ranks=2, num_chunks=1, num_microbatches=3)
    last = instructions(work, placement)[1]
    activation = [Transfer("activation", m, 0, 1) for m in range(3)]
    gradient = [Transfer("gradient", m, 1, 0) for m in range(3)]
    assert last == [
        TransferBatch((), (activation[0],)),
        Work("forward", 0, 0),
        TransferBatch((), (activation[1],)),
        Work("backward", 0, 0),
        TransferBatch((gradient[0],), ()),
        Work("forward", 1, 0),
        Work("backward", 1, 0),
        TransferBatch((gradient[1],), (activation[2],)),
        Work("forward", 2, 0),
        Work("backward", 2, 0),
        TransferBatch((gradient[2],), ()),
    ]


def test_nothing_is_sent_between_chunks_of_one_rank():
    placement = Placement(1, 3)
    passes = [Work("forward", 0, c) for c in range(3)]
    passes += [Work("backward", 0, c) for c in (2, 1, 0)]
    assert instructions((tuple(passes),), placement) == [passes]
    turn = Placement(2, 2, is_v=True)
    forwards = tuple(Work("forward", 0, c) for c in range(2))
    first, last = instructions((forwards, forwards), turn)
    assert last == [
        TransferBatch((), (Transfer("activation", 0, 0, 1),)),
        *forwards,
        TransferBatch((Transfer("activation", 0, 2, 3),), ()),
    ]


def test_early_receives_leave_one_more_pass_between_them_and_their_use():
    placement, work = schedule_of("1f1b", num_ranks=4, num_chunks=1, num_microbatches=8)

    def passes_ahead(early: bool) -> int:
        plan = instructions(work, placement, early=early)[1]
        second = Transfer("activation", 1, 0, 1)
        posted = next(
            i for i, x in enumerate(plan) if isinstance(x, TransferBatch) if second in x[1]
        )
        used = plan.index(Work("forward", 1, 0))
        return sum(isinstance(item, Work) for item in plan[posted:used])

    assert (passes_ahead(early=False), passes_ahead(early=True)) == (0, 1)


def test_an_order_that_waits_for_itself_is_refused():
    orders = ((Work("forward", 0, 1), Work("forward", 0, 0)), (Work("forward", 0, 0),))
    with pytest.raises(ValueError, match="never ends.*chunk=1"):
        instructions(orders, Placement(2, 2))


def test_a_group_smaller_than_the_pipeline_is_refused():
    with pytest.raises(ConfigError, match="virtual-pipeline-stage 3 is smaller than .* 4"):
        schedule_of(None, num_ranks=4, num_chunks=2, num_microbatches=8, group=3)
