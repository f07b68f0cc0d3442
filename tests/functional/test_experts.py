"""The real command line with layers of experts: the losses of one process, and resuming to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.pipeline_parallel import pass_interleaving
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from tests.functional.test_pretrain_gpt import generate, steps
from tests.support import selection, tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, run_gpt, train_gpt

EXPERTS = (
    "--num-layers 4 --eval-interval 3 --log-params-norm --num-experts 4 --disable-bias-linear "
    "--swiglu --moe-layer-freq [0]+[1]*3 --moe-token-dispatcher-type alltoall --moe-z-loss-coeff "
    "1e-3 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-2 "
    "--moe-shared-expert-intermediate-size 16 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-dtype fp32"
)
BASE = [*TINY, *EXPERTS.split()]
LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
    "--use-distributed-optimizer --recompute-granularity selective --recompute-modules moe"
)
KEYS = ("lm loss", "load_balancing_loss", "seq_load_balancing_loss", "z_loss", "grad-norm")
KEYS += ("params-norm", "lm loss validation")


@pytest.mark.feature("Layouts: GPT with experts trains to the same losses in any layout")
def test_divided_experts_print_the_losses_of_one_process(tmp_path: Path) -> None:
    base = [*BASE, "--moe-per-layer-logging", "--moe-latent-size", "24"]
    alone = run_gpt(tmp_path / "alone", base=base)
    found = run_gpt(tmp_path / "found", *LAYOUT.split(), base=base, world_size=4)
    loads = [f"moe/load_layer_{i}" for i in (1, 2, 3)]
    assert all(1 <= load < 4 for key in loads for load in losses(alone, key))
    assert "moe/load_layer_0" not in alone[0]
    for key in (*KEYS, *loads):
        assert losses(alone, key)
        torch.testing.assert_close(
            torch.tensor(losses(found, key)),
            torch.tensor(losses(alone, key)),
            **tolerances.LAYOUT_LOSS,
        )


GPT_OSS = (
    "--num-layers 4 --softmax-type learnable --window-size 5,0 --window-attn-skip-freq 2 "
    "--init-method-std 0.2 --num-experts 4 --quick-geglu --ffn-hidden-size 24 "
    "--activation-func-clamp-value 0.1 --glu-linear-offset 1 --position-embedding-type rope "
    "--rope-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16 "
    "--no-yarn-correction-range-round-to-int --group-query-attention --num-query-groups 2 "
    "--normalization RMSNorm --untie-embeddings-and-output-weights --log-params-norm "
    "--moe-router-load-balancing-type none"
)


@pytest.mark.parametrize(
    "layout",
    selection.first(
        1,
        [
            "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 "
            "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
            "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
            "--moe-token-dispatcher-type alltoall --use-distributed-optimizer",
        ],
    ),
)
def test_a_divided_gpt_oss_is_the_whole_one_and_writes_the_same(
    tmp_path: Path, layout: str
) -> None:
    base = [*TINY, *GPT_OSS.split()]
    alone = run_gpt(tmp_path / "alone", "--save", str(tmp_path / "one"), base=base)
    divided = ["--save", str(tmp_path / "four"), *layout.split()]
    found = run_gpt(tmp_path / "found", *divided, base=base, world_size=4)
    for key in ("lm loss", "grad-norm", "params-norm"):
        torch.testing.assert_close(
            torch.tensor(losses(found, key)),
            torch.tensor(losses(alone, key)),
            **tolerances.LAYOUT_LOSS,
        )
    (alone_text,) = run_ranks(generate, 1, str(tmp_path / "one"), "1 2 3")
    assert run_ranks(generate, 2, str(tmp_path / "four"), "1 2 3") == [alone_text, []]


def test_a_checkpoint_goes_on_with_its_experts_elsewhere(tmp_path: Path) -> None:
    """Weights, moments and the balancing bias: saved on two ranks, gone on with on one."""
    straight = steps(run_gpt(tmp_path / "straight", base=BASE))
    saved = ["--save", str(tmp_path / "ck"), "--save-interval", "2", "--exit-interval", "2"]
    layout = ["--expert-model-parallel-size", "2"]
    run_gpt(tmp_path / "first", *saved, *layout, base=BASE, world_size=2)
    load = ["--load", str(tmp_path / "ck")]
    rest = steps(run_gpt(tmp_path / "rest", *load, base=BASE))
    assert len(rest) == 2
    for found, expected in zip(rest, straight[2:], strict=True):
        torch.testing.assert_close(found, expected, **tolerances.LAYOUT_LOSS)


def whose_turn(rank: int, world_size: int, argv: list[str]) -> tuple[list[int], list[int]]:
    """Which pass of a pair has sent tokens off, each time, and how many weights waited for that."""
    seen: list[int] = []
    waited: list[int] = []
    yield_to_peer, run = pass_interleaving._Turns.yield_to_peer, WeightGradQueue.run

    def gives_way(self: Any) -> None:
        seen.append(self.running)
        yield_to_peer(self)

    def runs(self: WeightGradQueue, count: int | None = None) -> None:
        waited.append(len(self))
        run(self, count)

    with (
        mock.patch.object(pass_interleaving._Turns, "yield_to_peer", gives_way),
        mock.patch.object(WeightGradQueue, "run", runs),
    ):
        train_gpt(rank, world_size, argv)
    return seen, waited


@pytest.mark.feature("Mixture of experts: tokens travel while another micro-batch computes")
def test_a_forward_and_a_backward_pass_take_turns_where_tokens_travel() -> None:
    flags = (
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--train-iters 1 --overlap-moe-expert-parallel-comm --delay-wgrad-compute "
        "--micro-batch-size 1 --eval-iters 0"
    )
    num_pairs, num_journeys = 3, 4  # of a pass: there and back in two layers
    for seen, waited in run_ranks(whose_turn, 2, [*TINY, *flags.split()]):
        assert seen == [0, 1] * num_journeys * num_pairs
        in_each = waited[: num_journeys + 1]
        assert waited == in_each * num_pairs
        assert sum(n > 0 for n in in_each) > 2, "not all at the end"


DENSE = [*TINY, "--swiglu", "--ffn-hidden-size", "48", "--clip-grad", "0"]
UPCYCLED = {
    "copies, and shared experts": (
        "--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --moe-shared-expert-intermediate-size 16 "
        "--use-distributed-optimizer"
    ),
    "parts, cut by tensor parallelism": (
        "--num-experts 8 --moe-router-topk 4 --moe-upcycling-granularity 2 --moe-ffn-hidden-size "
        "24 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 2 --moe-router-score-function sigmoid "
        "--moe-router-topk-scaling-factor 2.5"
    ),
}


@pytest.mark.feature("Mixture of experts: a dense checkpoint becomes a model with equal first loss")
def test_experts_made_of_a_dense_checkpoint_begin_where_it_was(tmp_path: Path) -> None:
    """Then they go their own way, and the run is saved as any other."""
    dense = ["--load", str(tmp_path / "dense"), "--save", str(tmp_path / "dense")]
    run_gpt(tmp_path / "first", *dense, "--train-iters", "3", base=DENSE)
    start = ["--load", str(tmp_path / "dense"), "--train-iters", "3"]
    expected = losses(run_gpt(tmp_path / "on", *start, "--finetune", base=DENSE))
    for name, words in UPCYCLED.items():
        target = ["--save", str(tmp_path / name), "--moe-use-upcycling"]
        argv = [*start, *target, *words.split()]
        found = losses(run_gpt(tmp_path / f"{name}-run", *argv, base=DENSE, world_size=4))
        assert len(found) == 3
        assert found[0] == pytest.approx(expected[0], rel=1e-6), name
        assert abs(found[2] - expected[2]) > 1e-5
    again = [*UPCYCLED["copies, and shared experts"].split(), "--train-iters", "4"]
    again += ["--override-opt_param-scheduler"]
    load = ["--load", str(tmp_path / "copies, and shared experts")]
    assert len(losses(run_gpt(tmp_path / "again", *load, *again, base=DENSE, world_size=4))) == 1
