#!/usr/bin/env bash
# Serve a GPT of 345M parameters on one GPU, or with tensor parallelism on TP_SIZE of them.
#
#   bash examples/inference/gpt/run_text_generation_server_345m.sh CHECKPOINT_DIR [FLAGS...]
#
# FLAGS go to tools/run_text_generation_server.py; docs/serving.md lists them.
# Ask it: curl localhost:5000/v1/completions -d '{"prompt": "def main(", "max_tokens": 32}'
set -euo pipefail

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/gpt3_345m}

DISTRIBUTED_ARGS=(
    --standalone # one node; torchrun takes a free port
    --nproc_per_node "${GPUS_PER_NODE:-${TP_SIZE:-1}}"
)

SERVER_ARGS=(
    --load "$CHECKPOINT_PATH"
    --use-checkpoint-args
    --tensor-model-parallel-size "${TP_SIZE:-1}"
    --pipeline-model-parallel-size 1
    --inference-max-requests 32
    --inference-max-seq-length 1024
    --port "${PORT:-5000}"
)

exec torchrun "${DISTRIBUTED_ARGS[@]}" tools/run_text_generation_server.py "${SERVER_ARGS[@]}" "$@"
