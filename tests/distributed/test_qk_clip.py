"""QK-clip bounds the largest attention logit of each head, the same in every layout."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedBounds, PackedSeqParams
from megatron.core.parallel.context_parallel_partition import held_tokens
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.transformer import qk_clip
from megatron.core.transformer.attention import SelfAttentionBase
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.training.step.train_step import clear_gradients, forward_backward, reduce_gradients
from tests.support import tolerances
from tests.support.one_process import tiny_config
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, run_gpt
from tests.support.training_run import training_run

GROUPED = "--group-query-attention --num-query-groups 2 --position-embedding-type rope"
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --position-embedding-type rope"
)


def _tokens(config: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    while True:
        tokens = torch.randint(100, (2, 33), generator=generator)
        yield {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(2, 32),
            "position_ids": torch.arange(32).repeat(2, 1),
        }


def _two_steps(rank: int, world_size: int, words: str) -> tuple[dict[str, Tensor], Any]:
    """Return weights after a step, and the logits of heads in two steps, by plain products.

    Learning rate 0 leaves the weights to QK-clip.
    """
    flags = "--num-layers 1 --lr 0 --min-lr 0 --init-method-std 0.4"
    with contextlib.redirect_stdout(io.StringIO()):
        run = training_run([*TINY, *flags.split(), *words.split()])
    run.data.train = [_tokens(run.config)]
    found: list[Tensor] = []

    def record(core: DotProductAttention, qkv: tuple[Tensor, ...]) -> None:
        query, key = (x.detach().double() for x in qkv[:2])
        key = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * core.softmax_scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        found.append(scores.masked_fill(later, -torch.inf).amax((0, 2, 3)))

    chunk = run.model_chunks[0]
    (layer,) = (m for m in chunk.modules() if isinstance(m, SelfAttentionBase))
    layer.core_attention.register_forward_pre_hook(record)
    results = []
    for _ in range(2):
        run.data.train = [_tokens(run.config)]
        found.clear()
        clear_gradients(run)
        reduce_gradients(run, forward_backward(run, run.data.train, 4))
        results.append((torch.stack(found).amax(0), layer.largest_logits.clone()))
        run.optimizer.step()
        if len(results) == 1:
            weights = {name: p.detach().clone() for name, p in layer.named_parameters()}
    return weights, results


@pytest.mark.parametrize(
    ("words", "tolerance"),
    [
        (GROUPED, 1e-4),
        (f"{GROUPED} --bf16 --use-distributed-optimizer --optimizer dist_muon", 3e-2),
        (f"{GROUPED} --bf16 --use-precision-aware-optimizer --add-qkv-bias", 3e-2),
        (f"{LATENT} --recompute-granularity full --recompute-method uniform "
         "--recompute-num-layers 1", 1e-4),
    ],
    ids=["grouped", "muon", "remainders", "latent"],
)  # fmt: skip
def test_the_largest_logit_falls_to_the_threshold(words: str, tolerance: float):
    ((before, ((first, recorded), _)),) = run_ranks(_two_steps, 1, f"{words} --qk-clip")
    torch.testing.assert_close(recorded.double(), first, rtol=tolerance, atol=0)
    assert first.max() < 100  # the default threshold: nothing was scaled
    threshold = float(first.sort().values[1:3].mean())
    flags = f"{words} --qk-clip --qk-clip-alpha 0.3 --qk-clip-threshold {threshold}"
    ((after, (_, (second, _))),) = run_ranks(_two_steps, 1, flags)
    limits = first if "latent" in words else first.view(2, 2).amax(1).repeat_interleave(2)
    factors = (threshold / limits).clamp(max=1)
    torch.testing.assert_close(second, first * factors, rtol=tolerance, atol=0)
    close = {"rtol": tolerance, "atol": 1e-6}
    if "latent" in words:
        name = "linear_kv_up_proj.weight"
        rows = torch.stack([factors**0.7, torch.ones(4)], 1).repeat_interleave(8, 1)
        query = torch.cat([(factors**0.3).expand(8, 4), factors.expand(4, 4)]).T
        scaled = before["linear_q_up_proj.weight"].float() * query.reshape(-1, 1)
        torch.testing.assert_close(after["linear_q_up_proj.weight"].double(), scaled, **close)
    else:
        name = "linear_qkv.weight"
        group = factors.view(2, 2)[:, :1]
        rows = torch.cat([group**0.3, group**0.3, group**0.7, torch.ones(2, 1)], 1)
        rows = rows.repeat_interleave(8, 1)
    scaled = before[name].double() * rows.reshape(-1, 1)
    torch.testing.assert_close(after[name].double(), scaled, **close)


LAYOUTS = {
    "tensor": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pipeline": (2, "--pipeline-model-parallel-size 2"),
    "context": (2, "--context-parallel-size 2"),
    "distributed-optimizer": (2, "--use-distributed-optimizer --overlap-param-gather "
                              "--overlap-grad-reduce"),
    "fsdp": (2, "--use-torch-fsdp2"),
}  # fmt: skip


def test_every_layout_clips_as_one_process_does(tmp_path: Path):
    flags = f"{GROUPED} --log-params-norm --init-method-std 0.3".split()
    flags += ["--qk-clip", "--qk-clip-threshold", "0.5"]
    expected = run_gpt(tmp_path / "one", *flags)
    unclipped = run_gpt(tmp_path / "unclipped", *flags, "--qk-clip-threshold", "1000")
    assert losses(expected)[-1] != pytest.approx(losses(unclipped)[-1], rel=1e-3)
    for name, (ranks, layout) in LAYOUTS.items():
        found = run_gpt(tmp_path / name, *flags, *layout.split(), world_size=ranks)
        for key in ("lm loss", "params norm"):
            assert losses(found, key) == pytest.approx(losses(expected, key), rel=1e-5), name


def _core(**changes: Any) -> tuple[Any, Any]:
    groups = create_process_groups(*make_grids(1))
    return DotProductAttention(tiny_config(**changes), 1, pg_collection=groups), groups


def _shared(rank: int, world_size: int, lengths: tuple[int, ...] | None) -> Tensor:
    """Return the largest logits over context-parallel ranks, each with its own queries."""
    groups = create_process_groups(*make_grids(world_size, cp=world_size))
    core = DotProductAttention(tiny_config(), 1, pg_collection=groups)
    query, key = _query_key()
    held = held_tokens(lengths or (16,), rank, world_size)
    return qk_clip.largest_logits(
        query[held], key[held], core, groups.cp, packed=_packed(lengths) if lengths else None
    )


def _query_key() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(16, 2, 4, 8, generator=generator),
        torch.randn(16, 2, 2, 8, generator=generator),
    )


def _packed(lengths: tuple[int, ...]) -> PackedSeqParams:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams("thd", ends, ends)


def _plain(hidden: Tensor) -> Tensor:
    """Return the largest of all scores that ``hidden`` [.., q, k] leaves: [n]."""
    query, key = _query_key()
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key.repeat_interleave(2, 2)) / 8**0.5
    later = torch.ones(16, 16, dtype=torch.bool).triu(1)
    return scores.masked_fill(later | hidden, -torch.inf).amax((0, 2, 3))


def _apart(*lengths: int) -> Tensor:
    part = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return part[:, None] != part


def _of_masks(rank: int, world_size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return pairs of found and expected logits, for blocks of five queries."""
    qk_clip._QUERIES = 5
    query, key = _query_key()
    place = torch.arange(16)
    nothing = torch.zeros(16, 16, dtype=torch.bool)
    mask = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(2)) < 0.3
    mask = mask & ~torch.eye(16, dtype=torch.bool)
    documents = PackedBounds(torch.tensor([0, 3, 16, 26, 32]).int(), 13)
    of_rows = torch.stack([_apart(3, 13), _apart(10, 6)]).unsqueeze(1)
    core, groups = _core()
    windowed, _ = _core(window_size=(4, 0))

    def found(core: Any = core, **more: Any) -> Tensor:
        return qk_clip.largest_logits(query, key, core, groups.cp, **more)

    return {
        "causal": (found(), _plain(nothing)),
        "window": (found(windowed), _plain(place < place[:, None] - 4)),
        "mask": (found(mask=mask), _plain(mask)),
        "packed": (found(packed=_packed((6, 3, 7))), _plain(_apart(6, 3, 7))),
        "documents": (found(mask=documents), _plain(of_rows)),
    }


def test_logits_are_the_largest_of_all_scores_that_masks_leave():
    for name, (found, expected) in run_ranks(_of_masks, 1)[0].items():
        torch.testing.assert_close(
            found, expected, **tolerances.of(torch.float32), msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("lengths", [None, (4, 12)])
def test_context_parallel_ranks_see_the_keys_of_all(lengths: tuple[int, ...] | None):
    shares = run_ranks(_shared, 2, lengths)
    expected = _plain(_apart(*(lengths or (16,))))
    torch.testing.assert_close(
        torch.stack(shares).amax(0), expected, **tolerances.of(torch.float32)
    )
