"""Every plan run against NCCL's rules on a clock, and its figures against the published ones."""

from itertools import accumulate, pairwise

import pytest

from megatron.core.pipeline_parallel.communication_plan import instructions
from megatron.core.pipeline_parallel.plan import (
    Placement,
    Transfer,
    TransferBatch,
    Work,
    is_pair,
    schedule_of,
)
from tests.support import selection
from tests.support.pipeline_simulator import (
    DeadlockError,
    Durations,
    simulate,
)


def run(name, durations=None, *, early=False, blocking=False, forward_only=False, **sizes):
    placement, work = schedule_of(name, forward_only=forward_only, **sizes)
    plan = instructions(work, placement, early=early)
    done = [w for rank in plan for w in rank if isinstance(w, Work)]
    passes = sizes["num_microbatches"] * placement.num_stages
    for kind in ("forward",) if forward_only else ("forward", "backward"):
        assert sum(w.kind == kind for w in done) == passes
    return simulate(plan, placement, durations, blocking=blocking)


def bubble(ran):
    """Idle time over busy time until all ranks have ended, over all ranks."""
    return ran.finish * len(ran.busy) / sum(ran.busy) - 1


def most_alive(name, last, **sizes):
    """Of each rank the most passes at one time between their forward and their ``last`` pass."""
    _, orders = schedule_of(name, **sizes)
    steps = ([(w.kind == "forward") - (w.kind == last) for w in work] for work in orders)
    return [max(accumulate(each)) for each in steps]


def all_layouts():
    """(schedule, sizes): 1f1b and zero bubble up to 6 ranks, interleaved with groups."""
    for ranks in range(1, 7):
        for microbatches in range(1, 12):
            sizes = {"num_ranks": ranks, "num_microbatches": microbatches}
            yield "1f1b", {**sizes, "num_chunks": 1}
            yield "zb-h1", {**sizes, "num_chunks": 1}
            yield "zb-v", {**sizes, "num_chunks": 2}
            for chunks in (2, 3):
                for group in {ranks, ranks + 1, ranks + 3}:
                    yield "interleaved", {**sizes, "num_chunks": chunks, "group": group}


@pytest.mark.parametrize("blocking", selection.first(1, [True, False]))
def test_of_a_pair_of_passes_neither_needs_the_other(blocking):
    for name, sizes in all_layouts():
        if name.startswith("zb"):
            continue
        placement, work = schedule_of(name, in_pairs=True, **sizes)
        plan = instructions(work, placement, in_pairs=True)
        turned = [list(rank) for rank in plan]
        for rank in turned:
            at = 0
            while at + 1 < len(rank):
                if is_pair(*rank[at : at + 2]):
                    rank[at : at + 2] = rank[at + 1], rank[at]
                    at += 1
                at += 1
        for order in (plan, turned):
            simulate(order, placement, blocking=blocking)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_pairs_fill_the_steady_state_and_cost_no_time(name, chunks):
    sizes = {"num_ranks": 4, "num_microbatches": 16, "num_chunks": chunks}
    one = Durations(weight=0)
    plain = run(name, one, **sizes)
    placement, work = schedule_of(name, in_pairs=True, **sizes)
    plan = instructions(work, placement, in_pairs=True)
    assert simulate(plan, placement, one).finish == plain.finish
    for rank in plan:
        forwards = sum(isinstance(w, Work) and w.kind == "forward" for w in rank)
        warmup = next(i for i, w in enumerate(w for w in rank if isinstance(w, Work))
                      if w.kind == "backward") - 1  # fmt: skip
        assert sum(is_pair(*pair) for pair in pairwise(rank)) == forwards - warmup


@pytest.mark.feature("Pipeline parallel: no schedule can deadlock, shown by simulating each")
@pytest.mark.parametrize(
    ("early", "blocking"),
    selection.first(2, [(False, True), (True, False), (False, False), (True, True)]),
)
def test_every_schedule_ends_whenever_batches_are_completed(early, blocking):
    layouts = list(all_layouts())
    assert len(layouts) > 500
    for name, sizes in layouts:
        run(name, Durations(transfer=0.1), early=early, blocking=blocking, **sizes)


@pytest.mark.parametrize("blocking", selection.first(1, [True, False]))
def test_every_evaluation_ends(blocking):
    for name, sizes in all_layouts():
        run(name, blocking=blocking, forward_only=True, **sizes)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (4, 8), (8, 9), (8, 64)])
def test_1f1b_has_the_published_bubble_and_memory(ranks, microbatches):
    sizes = {"num_ranks": ranks, "num_chunks": 1, "num_microbatches": microbatches}
    assert bubble(run("1f1b", **sizes)) == pytest.approx((ranks - 1) / microbatches)
    expected = [min(ranks - rank, microbatches) for rank in range(ranks)]
    assert most_alive("1f1b", "backward", **sizes) == expected


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches"), [(2, 2, 2), (4, 2, 8), (4, 3, 12), (8, 2, 32), (8, 4, 8)]
)
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(ranks, chunks, microbatches):
    sizes = {"num_ranks": ranks, "num_chunks": chunks, "num_microbatches": microbatches}
    assert bubble(run("interleaved", **sizes)) == pytest.approx(
        (ranks - 1) / (chunks * microbatches)
    )
    # Of one micro-batch each: warm-up and one more, but no more than there are.
    warmup = [2 * (ranks - 1 - rank) + (chunks - 1) * ranks for rank in range(ranks)]
    expected = [min(passes + 1, chunks * microbatches) for passes in warmup]
    assert most_alive("interleaved", "backward", **sizes) == expected


@pytest.mark.feature("Pipeline parallel: zero-bubble schedules ZB-H1 and ZB-V")
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16), (5, 31)])
def test_zero_bubble_has_the_published_bubble_at_the_memory_of_1f1b(ranks, microbatches):
    sizes = {"num_ranks": ranks, "num_chunks": 1, "num_microbatches": microbatches}
    assert max(run("zb-h1", **sizes).idle) == ranks - 1  # of 3 * (ranks - 1) in 1F1B
    assert set(most_alive("zb-h1", "weight", **sizes)) == {ranks}
    sizes["num_chunks"] = 2
    assert set(run("zb-v", **sizes).idle) == {0}
    assert max(most_alive("zb-v", "weight", **sizes)) == 2 * ranks  # of half a stage each


def test_transfers_of_the_interleaved_schedule_hide_behind_work():
    sizes = {"num_ranks": 8, "num_chunks": 2, "num_microbatches": 32}

    def lost(**how) -> float:
        slow = run("interleaved", Durations(transfer=0.2), **sizes, **how)
        fast = run("interleaved", **sizes, **how)
        return slow.finish - fast.finish

    # The first activation goes through 16 stages, and its gradient back.
    assert 2 * 15 * 0.2 <= lost() < 2 * 15 * 0.2 + 1
    assert lost(blocking=True) > 4 * lost()


def test_a_plan_in_which_both_ranks_send_first_deadlocks():
    """Each rank would send before it receives: with a buffer it runs, with rendezvous it cannot."""
    there = Transfer("activation", 0, 0, 1)
    again = Transfer("activation", 1, 1, 2)
    placement = Placement(2, 2)
    forwards = {(m, c): Work("forward", m, c) for m in range(2) for c in range(2)}
    first = [
        forwards[0, 0],
        TransferBatch((there,), ()),
        TransferBatch((), (again,)),
        forwards[0, 1],
    ]
    last = [TransferBatch((again,), ()), TransferBatch((), (there,)), forwards[0, 0]]
    with pytest.raises(
        DeadlockError, match="rank 0 waits in TransferBatch.*\nrank 1 waits in TransferB"
    ):
        simulate([first, last], placement)


def test_tensors_that_would_be_taken_for_each_other_are_found():
    placement, work = schedule_of("1f1b", num_ranks=2, num_chunks=1, num_microbatches=2)
    first, last = (list(rank) for rank in instructions(work, placement))
    batches = [i for i, item in enumerate(last) if isinstance(item, TransferBatch)]
    last[batches[0]], last[batches[1]] = last[batches[1]], last[batches[0]]
    with pytest.raises(DeadlockError, match="transfer 0 from rank 0 to 1: sent .*microbatch=0"):
        simulate([first, last], placement)
