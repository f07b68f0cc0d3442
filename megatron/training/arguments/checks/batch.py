"""Checks of batch sizes."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig


def batch_is_dealt_out_evenly(run: RunConfig) -> Iterator[str]:
    """Require equally many complete micro-batches on every data-parallel rank."""
    t, dp = run.training, run.data_parallel_size
    micro, batch = t.micro_batch_size, t.global_batch_size
    if micro < 1 or batch < 1:
        return
    share = micro * dp
    if batch < share:
        yield (
            f"--global-batch-size {batch} is less than --micro-batch-size {micro} x {dp} "
            f"data-parallel ranks = {share}: raise it to {share}"
        )
    elif batch % share and not t.decrease_batch_size_if_needed:
        yield (
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro} x "
            f"{dp} data-parallel ranks = {share}: use a multiple of {share}, or add "
            "--decrease-batch-size-if-needed"
        )


def rampup_reaches_the_batch(run: RunConfig) -> Iterator[str]:
    """Require three ramp-up values that reach the global batch size in equal steps."""
    t = run.training
    if t.rampup_batch_size is None:
        return
    shown = "--rampup-batch-size " + " ".join(str(n) for n in t.rampup_batch_size)
    if len(t.rampup_batch_size) != 3:
        yield f"{shown}: give three numbers, START INCREMENT SAMPLES"
        return
    start, increment, samples = t.rampup_batch_size
    if start < 1 or increment < 1 or samples < 0:
        yield f"{shown}: START and INCREMENT must be at least 1 and SAMPLES at least 0"
        return
    batch = t.global_batch_size
    if batch < start or (batch - start) % increment:
        yield (
            f"{shown} does not reach --global-batch-size {batch} from {start} in steps of "
            f"{increment}"
        )


def rampup_is_dealt_out_evenly(run: RunConfig) -> Iterator[str]:
    """Require that each ramp-up batch splits evenly over data-parallel ranks."""
    t = run.training
    share = t.micro_batch_size * run.data_parallel_size
    ramp = t.rampup_batch_size or ()
    if len(ramp) != 3 or share < 1 or t.decrease_batch_size_if_needed:
        return
    for name, value in (("START", ramp[0]), ("INCREMENT", ramp[1])):
        if value > 0 and value % share:
            yield (
                f"--rampup-batch-size {name} {value} is not a multiple of --micro-batch-size "
                f"{t.micro_batch_size} x {run.data_parallel_size} data-parallel ranks = {share}: "
                "use "
                f"a multiple of {share}"
            )
