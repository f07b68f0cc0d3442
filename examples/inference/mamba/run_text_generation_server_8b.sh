#!/usr/bin/env bash
# Serve a Mamba-2 model, or a hybrid, of 8B parameters with tensor parallelism on 8 GPUs.
#
#   bash examples/inference/mamba/run_text_generation_server_8b.sh CHECKPOINT_DIR [FLAGS...]
#
# FLAGS go to tools/run_mamba_text_generation_server.py; docs/serving.md lists them.
# Ask it: curl localhost:5000/v1/completions -d '{"prompt": "def main(", "max_tokens": 32}'
set -euo pipefail

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/mamba_8b}

DISTRIBUTED_ARGS=(
    --standalone # one node; torchrun takes a free port
    --nproc_per_node "${GPUS_PER_NODE:-${TP_SIZE:-8}}"
)

SERVER_ARGS=(
    --load "$CHECKPOINT_PATH"
    --use-checkpoint-args
    --tensor-model-parallel-size "${TP_SIZE:-8}"
    --pipeline-model-parallel-size 1
    --inference-max-requests 16
    --inference-max-seq-length 4096
    --port "${PORT:-5000}"
)

exec torchrun "${DISTRIBUTED_ARGS[@]}" tools/run_mamba_text_generation_server.py "${SERVER_ARGS[@]}" "$@"
