#!/usr/bin/env bash
# Fill hidden spans of words with T5 220M, on one GPU.
#
#   bash examples/inference/t5/t5_batch_inference_220m.sh CHECKPOINT_DIR [FLAGS...]
#
# FLAGS go to examples/inference/t5/simple_t5_batch_inference.py, for instance --prompts or --output-path.
set -euo pipefail

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/t5_220m}

DISTRIBUTED_ARGS=(
    --standalone # one node; torchrun takes a free port
    --nproc_per_node "${GPUS_PER_NODE:-1}"
)

INFERENCE_ARGS=(
    --load "$CHECKPOINT_PATH"
    --use-checkpoint-args
    --inference-max-requests 8
    --max-batch-size 8
    --temperature 1.0
    --top_k 1
    --num-tokens-to-generate 32
    --prompts ""
    --encoder-prompts "The capital of <extra_id_0> is Paris"
)

exec torchrun "${DISTRIBUTED_ARGS[@]}" examples/inference/t5/simple_t5_batch_inference.py \
    "${INFERENCE_ARGS[@]}" "$@"
