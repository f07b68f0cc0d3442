"""Which tokens a rank holds, and in which order a ring sends, computes and waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.parallel.context_parallel_partition import (
    blocks_of,
    held_spans,
    held_tokens,
    order_of_gathered,
    sequence_divisor,
)
from megatron.core.transformer import attention_blocks, context_parallel
from megatron.core.transformer.attention_blocks import BlockCall, BlockKernel, ScoreRule
from megatron.core.transformer.attention_masks import band
from megatron.core.transformer.context_parallel import (
    AttentionContext,
    RingPlan,
    _bands,
    comm_type_of_layer,
    ring_attention,
)
from tests.support.one_process import tiny_config


def test_a_rank_holds_an_early_and_a_late_chunk_of_each_sequence() -> None:
    assert held_tokens((8,), 0, 2).tolist() == [0, 1, 6, 7]
    assert held_tokens((8,), 1, 2).tolist() == [2, 3, 4, 5]
    assert held_tokens((4, 8), 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
    assert held_tokens((5, 2), 0, 1).tolist() == list(range(7))
    assert [s.first for s in held_spans((4, 8), 0, 2)] == [0, 0, 4, 4]
    with pytest.raises(ConfigError, match="pad each packed sequence to a multiple of 8"):
        held_tokens((12,), 0, 4)


@pytest.mark.parametrize("given", ["all_gather", ("all_gather", "p2p"), ["all_gather", "p2p"]])
def test_both_spellings_of_all_gather_are_one_type(given: object) -> None:
    assert comm_type_of_layer(tiny_config(cp_comm_type=given), 0) == "allgather"


def test_what_ranks_hold_can_be_sorted_and_put_back() -> None:
    lengths, ranks = (8, 16), (2, 3)
    gathered = torch.cat([held_tokens(lengths, r, 4) for r in ranks])
    order, undo = order_of_gathered(lengths, ranks, 4)
    assert gathered[order].tolist() == sorted(gathered.tolist())
    assert torch.equal(gathered[order][undo], gathered)
    # Neighbours together hold what one rank of a smaller group holds.
    assert gathered[order].tolist() == held_tokens(lengths, 1, 2).tolist()


def test_what_the_length_of_a_sequence_must_divide_by() -> None:
    assert sequence_divisor(cp=2) == 4
    assert sequence_divisor(tp=3, sequence_parallel=True) == 3
    assert sequence_divisor(cp=2, tp=4, sequence_parallel=True) == 8
    assert sequence_divisor(cp=2, tp=3, sequence_parallel=True) == 12


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("lengths", [(16,), (8, 24)])
def test_blocks_cover_what_a_query_sees_once_and_are_equal_work(
    lengths: tuple[int, ...], is_causal: bool
) -> None:
    size, total = 4, sum(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    expected = document[:, None] == document
    if is_causal:
        expected &= band(total, total, -1, 0, expected.device)
    met, work = torch.zeros(total, total), torch.zeros(size)
    for rank in range(size):
        for source in range(size):
            for block in blocks_of(lengths, rank, source, size, is_causal):
                queries = held_tokens(lengths, rank, size)[block.queries]
                keys = held_tokens(lengths, source, size)[block.keys]
                seen = torch.ones(len(queries), len(keys))
                seen = seen.tril() if block.is_causal else seen
                met[queries[:, None], keys] += seen
                work[rank] += seen.sum()
    assert torch.equal(met, expected.float())
    assert len(work.unique()) == 1


@pytest.mark.parametrize("window", [(5, 0), (0, 0), (3, 2), (-1, 0), (-1, 3), (40, 0)])
@pytest.mark.parametrize("lengths", [(16,), (8, 24)])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("skips_keys", [True, False])
def test_bands_cover_the_window_of_a_query_once_and_leave_no_query_without_a_key(
    skips_keys: bool,
    size: int,
    lengths: tuple[int, ...],
    window: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context_parallel, "_QUERIES", 3)  # without skipped keys: in parts
    _bands.cache_clear()
    total = sum(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    expected = (document[:, None] == document) & band(total, total, *window, document.device)
    met = torch.zeros(total, total)
    for rank in range(size):
        for source in range(size):
            for block, moved in _bands(lengths, rank, source, size, window, skips_keys):
                queries = held_tokens(lengths, rank, size)[block.queries]
                keys = held_tokens(lengths, source, size)[block.keys]
                assert min(moved) >= 0, "a negative side has another meaning for the kernel"
                seen = band(len(queries), len(keys), *moved, keys.device)
                assert seen.any(1).all()
                met[queries[:, None], keys] += seen
    assert torch.equal(met, expected.float())


@dataclass
class RecordedRing:
    """A ring whose other ranks send zeros, and which writes down what happens."""

    size: int
    rank: int = 1
    events: list[str] = field(default_factory=list)

    def shift(self, x: Tensor) -> Callable[[], Tensor]:
        number = sum(e.startswith("shift") for e in self.events)
        self.events.append(f"shift {number}")

        def wait() -> Tensor:
            self.events.append(f"wait {number}")
            return torch.zeros_like(x)

        return wait

    def kernel(self) -> BlockKernel:
        plain = attention_blocks.block_kernel("plain")

        def forward(call: BlockCall) -> object:
            self.events.append("compute")
            return plain.forward(call)

        def backward(*args: object) -> object:
            self.events.append("compute")
            return plain.backward(*args)  # type: ignore[arg-type]

        return BlockKernel(forward, backward)  # type: ignore[arg-type]


@pytest.mark.feature("Context parallelism: keys and values travel while a block is computed")
def test_a_shift_is_posted_before_the_block_in_hand_is_computed() -> None:
    ring = RecordedRing(size=3)
    plan = RingPlan(
        ring=ring,
        lengths=(12,),
        kernel=ring.kernel(),
        rule=ScoreRule(scale=1.0),
        context=AttentionContext(is_causal=True),
    )
    q, k, v = (torch.randn(4, 1, 2, 8).requires_grad_() for _ in range(3))
    out = ring_attention(q, k, v, plan)
    assert " ".join(ring.events) == ("shift 0 compute wait 0 shift 1 compute wait 1 compute")
    ring.events.clear()
    out.sum().backward()
    # Shifts 0 and 2 carry keys and values, the others gradients on their way home, which are
    # waited for when the next block has been computed.
    assert " ".join(ring.events) == (
        "shift 0 compute shift 1 wait 0 "
        "shift 2 compute wait 1 shift 3 wait 2 "
        "compute wait 3 shift 4 wait 4"
    )


def test_a_list_of_types_counts_layers_from_the_first() -> None:
    types = ("p2p", "a2a")
    config = tiny_config(cp_comm_type=types)
    assert [comm_type_of_layer(config, i) for i in range(2)] == list(types)
    assert comm_type_of_layer(tiny_config(cp_comm_type="allgather"), 1) == "allgather"
    assert comm_type_of_layer(tiny_config(), 1) == "p2p"


def test_the_flash_kernel_of_a_gpu_takes_what_it_is_given() -> None:
    """Shapes and arguments alone: the meta device computes nothing."""
    kernel = attention_blocks._KERNELS["flash"]
    q, k = (torch.empty(2, n, 48, 64, dtype=torch.bfloat16, device="meta") for n in (4, 2))
    call = BlockCall(q=q, k=k, v=k, rule=ScoreRule(scale=0.1, dropout=0.1))
    out, lse, kept = kernel.forward(call)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
    grads = kernel.backward(call, torch.empty_like(out), out, lse, kept)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
