"""Runs over gloo make calls that neither hang on NCCL nor pass it what it does not take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import selection
from tests.support.host_gpu import nccl_calls, nccl_order
from tests.support.host_gpu.nccl_order import Call
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, train_gpt

Recorded = tuple[list[Call], dict[str, list[int]]]


def check(found: list[Recorded]) -> None:
    """Raise if the calls of all ranks hang on NCCL, with any number of hardware queues."""
    members = {name: ranks for _, groups in found for name, ranks in groups.items()}
    for one_queue in (False, True):
        nccl_order.check([calls for calls, _ in found], members, one_queue=one_queue)


SHORT = (
    "--num-layers 4 --train-iters 2 --global-batch-size 16 --log-params-norm --eval-interval 2 "
    "--eval-iters 1 --timing-log-level 1"
)
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --expert-model-parallel-size 2 "
    "--moe-router-load-balancing-type aux_loss"
)
LAYOUTS = {
    "TP, PP, ZeRO": f"{TP} {PP} {SHARDED}",
    "interleaved": f"{PP} --num-virtual-stages-per-pipeline-rank 2 {SHARDED}",
    "interleaved, early receives": (
        "--pipeline-model-parallel-size 4 --num-layers 8 --overlap-p2p-communication-warmup-flush "
        "--num-virtual-stages-per-pipeline-rank 2"
    ),
    "no overlap of stages": "--pipeline-model-parallel-size 4 --no-overlap-p2p-communication",
    "zb-h1": f"{PP} --pipeline-schedule zb-h1 {SHARDED}",
    "zb-v": f"{PP} --pipeline-schedule zb-v --use-distributed-optimizer --overlap-grad-reduce",
    "ring": f"--context-parallel-size 4 {SHARDED}",
    "two levels": (
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
    ),
    "all-to-all of heads": f"--context-parallel-size 2 --cp-comm-type a2a {PP}",
    "experts": f"{TP} {EXPERTS} {SHARDED} --moe-token-dispatcher-type alltoall",
    "flexible experts": (
        f"{TP} {EXPERTS} --moe-token-dispatcher-type flex --moe-shared-expert-intermediate-size 32"
    ),
    "gathered experts": f"{TP} {EXPERTS} --expert-tensor-parallel-size 1 "
    "--moe-token-dispatcher-type allgather",
    "interleaved experts": (
        f"{PP} {EXPERTS} --num-virtual-stages-per-pipeline-rank 2 {SHARDED} --bf16 "
        "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm "
        "--delay-wgrad-compute --no-gradient-accumulation-fusion"
    ),
    "sharded parameters": (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--num-distributed-optimizer-instances 2"
    ),
    "instances": f"{SHARDED} --num-distributed-optimizer-instances 2",
    "Muon": f"{TP} --optimizer muon --use-distributed-optimizer",
    "async local saves": (
        f"{PP} --save SAVE --save-interval 1 --async-save --non-persistent-save-interval 1 "
        "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir SAVE/local --replication "
        "--replication-jump 2"
    ),
}


def train(rank: int, world_size: int, argv: list[str]) -> Recorded:
    with nccl_calls.recorded() as record:
        train_gpt(rank, world_size, argv)
    return record.calls, record.members


DEFAULT = (
    "TP, PP, ZeRO",
    "interleaved, early receives",
    "two levels",
    "flexible experts",
    "sharded parameters",
    "Muon",
)  # of `make test`


@pytest.mark.parametrize("name", selection.only(DEFAULT, LAYOUTS))
def test_ranks_of_a_layout_do_not_hang_on_nccl(name: str, tmp_path: Path) -> None:
    flags = LAYOUTS[name].replace("SAVE", str(tmp_path))
    found = run_ranks(train, 4, [*TINY, *SHORT.split(), *flags.split()], timeout_s=120)
    assert all(calls for calls, _ in found)
    check(found)
