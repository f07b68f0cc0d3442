"""When the loss comes in chunks by itself."""

from __future__ import annotations

import pytest

from megatron.training.estimates.automatic_settings import chunk_line, resolve_loss_chunks
from megatron.training.planning.run_plan import plan_lines, plan_run
from tests.support.command_lines import run_of

WORDS = "--seq-length 512 --max-position-embeddings 512 --padded-vocab-size 100000"
LOGITS = 2 * 512 * 100_000 * 4  # of a micro-batch, fp32


@pytest.mark.feature("Memory: where logits would take a tenth of it, they are never whole")
def test_logits_beyond_a_tenth_of_the_memory_come_in_chunks() -> None:
    run = run_of(WORDS)
    assert resolve_loss_chunks(run, 100_000, 10 * LOGITS).model.loss_chunk_size is None
    settled = resolve_loss_chunks(run, 100_000, 9.9 * LOGITS)
    assert settled.model.loss_chunk_size == 256, "a tenth of it is less than is worth while"
    assert "logits of all 1024 would take 0.38 GiB" in str(chunk_line(settled, 100_000))
    halved = run_of(f"{WORDS} --tensor-model-parallel-size 2", 2)
    assert resolve_loss_chunks(halved, 100_000, 9.9 * LOGITS).model.loss_chunk_size is None
    whole = run_of(f"{WORDS} --loss-chunk-size 0")
    assert resolve_loss_chunks(whole, 100_000, 1).model.loss_chunk_size == 0


def test_the_planner_knows_of_chunks() -> None:
    words = f"{WORDS} --hidden-dropout 0 --attention-dropout 0"
    whole, cut = (plan_run(run_of(f"{words} {more}")) for more in ("", "--loss-chunk-size 128"))
    saved = whole.fullest.peak - cut.fullest.peak
    assert saved > LOGITS * 7 / 8, "and as many values in float32"
    assert any(line.startswith("loss in chunks of 128 tokens") for line in plan_lines(cut))
