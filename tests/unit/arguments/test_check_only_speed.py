"""--check-only plans a run with any of the flags that only make it faster."""

from __future__ import annotations

import pytest

from megatron.training.arguments.parser import parse_args
from megatron.training.planning.check import check_only
from tests.support import selection
from tests.support.command_lines import argv

TP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
ALLTOALL = "--moe-token-dispatcher-type alltoall"
EXPERTS = f"--num-experts 4 --expert-model-parallel-size 2 {ALLTOALL} --bf16"
DEEPEP = EXPERTS.replace("alltoall", "flex --moe-router-dtype fp32 --moe-enable-deepep")
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FSDP = "--no-gradient-accumulation-fusion --use-torch-fsdp2"
MEGATRON_FSDP = (
    "--no-gradient-accumulation-fusion --use-megatron-fsdp "
    "--data-parallel-sharding-strategy optim_grads_params"
)
FP8 = "--bf16 --fp8-format hybrid"
OFFLOAD = "--optimizer-cpu-offload --device auto"

SPEED = [
    f"{TP} --tp-comm-overlap",
    f"{TP} --tp-comm-overlap --transformer-impl local",
    f"{TP} --tp-comm-overlap {FP8}",
    f"{TP} --tp-comm-overlap {FSDP}",
    f"{TP} --tp-comm-overlap {MEGATRON_FSDP}",
    f"{TP} --tp-comm-overlap {EXPERTS}",
    f"{TP} --tp-comm-overlap {PP}",
    f"{TP} --tp-comm-overlap --lora-rank 4",
    f"{TP} --tp-comm-overlap --tp-comm-overlap-rs-dgrad --tp-comm-overlap-cfg buffers.yaml",
    f"{TP} --tp-comm-overlap --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs",
    f"{TP} --tp-comm-overlap --disable-tp-comm-split-ag --disable-tp-comm-split-rs",
    f"{TP} --tp-comm-overlap --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad",
    f"{TP} --tp-comm-overlap --tp-comm-bootstrap-backend mpi",
    f"{TP} --use-tp-pp-dp-mapping",
    f"{SHARDED} --overlap-param-gather-with-optimizer-step",
    f"{SHARDED} --ddp-bucket-size 1000 --ddp-pad-buckets-for-high-nccl-busbw",
    f"{SHARDED} --ddp-num-buckets 2 --ddp-average-in-collective",
    f"{SHARDED} --num-distributed-optimizer-instances 2",
    f"{SHARDED} --use-nccl-ub --high-priority-stream-groups dp_cp",
    f"{SHARDED} --bf16 --use-precision-aware-optimizer --main-grads-dtype bf16",
    "--use-sharp --nccl-communicator-config-path options.yaml",
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion",
    "--no-bias-dropout-fusion --no-persist-layer-norm",
    "--swiglu --no-bias-swiglu-fusion --position-embedding-type rope --no-rope-fusion",
    f"--squared-relu --use-fused-weighted-squared-relu {EXPERTS}",
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    *(f"--attention-backend {name}" for name in ("flash", "fused", "unfused", "local")),
    "--use-flash-attn",
    "--enable-cuda-graph --te-rng-tracker",
    "--enable-cuda-graph --cuda-graph-scope full_iteration --no-check-for-nan-in-loss-and-grad",
    "--external-cuda-graph --te-rng-tracker --cuda-graph-warmup-steps 1",
    "--recompute-activations",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    f"{PP} --num-layers-per-virtual-pipeline-stage 1 --overlap-p2p-communication-warmup-flush",
    f"{PP} --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
    f"{PP} --num-virtual-stages-per-pipeline-rank 2 --overlap-moe-expert-parallel-comm "
    f"--delay-wgrad-compute {EXPERTS}",
    f"{PP} --defer-embedding-wgrad-compute --wgrad-deferral-limit 2",
    f"{PP} --pipeline-schedule zb-h1 --pipeline-split auto",
    f"{PP} --use-ring-exchange-p2p --pipeline-model-parallel-comm-backend ucc",
    f"{EXPERTS} --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion",
    f"{EXPERTS} --moe-shared-expert-intermediate-size 32 --moe-shared-expert-overlap",
    f"{EXPERTS} --overlap-moe-expert-parallel-comm",
    f"{EXPERTS} --moe-layer-recompute",
    f"{EXPERTS} --fp8-format hybrid --moe-router-padding-for-fp8",
    f"{DEEPEP} --moe-deepep-num-sms 24",
    f"{OFFLOAD} --optimizer-offload-fraction 0.5 --no-pin-cpu-grads --no-pin-cpu-params",
    f"{OFFLOAD} --use-distributed-optimizer --overlap-cpu-optimizer-d2h-h2d",
    "--cpu-offloading --cpu-offloading-num-layers 1",
    *(f"{FP8} --fp8-recipe {name}" for name in ("delayed", "blockwise", "mxfp8")),
    f"{FP8} --fp8-recipe tensorwise --fp8-param-gather {SHARDED} --keep-fp8-transpose-cache",
    f"{FP8} --fp8-recipe mxfp8 --fp8-param-gather {SHARDED} --reuse-grad-buf-for-mxfp8-param-ag",
    "--bf16 --fp4-format e2m1",
    "--bf16 --grad-reduce-in-bf16",
    f"{FSDP} --torch-fsdp2-no-reshard-after-forward",
    f"{MEGATRON_FSDP} --init-model-with-meta-device",
    f"{MEGATRON_FSDP} --fsdp-double-buffer --use-nccl-ub",
    *(f"--context-parallel-size 2 --cp-comm-type {name}" for name in ("a2a", "all_gather", "p2p")),
    "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    "--loss-chunk-size 16 --rehearse-memory --manual-gc --empty-unused-memory-level 2",
]


@pytest.mark.parametrize("words", selection.only(SPEED[::3], SPEED))
def test_a_run_with_flags_of_speed_is_planned(words: str) -> None:
    lines: list[str] = []
    small = "--num-layers 4 --hidden-size 64 --global-batch-size 16 --check-world-size 8"
    status = check_only(parse_args(argv=argv(f"--check-only {small} {words}")), lines.append)
    assert (status, lines[0]) == (0, "this run can start on 8 ranks"), "\n".join(lines)
