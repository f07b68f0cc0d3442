#!/usr/bin/env bash
# Generate text with Llama 3 8B on one GPU, or with tensor parallelism on TP_SIZE of them.
#
#   bash examples/inference/llama/llama3_8b_static_inference.sh CHECKPOINT_DIR [FLAGS...]
#
# FLAGS go to examples/inference/gpt/gpt_static_inference.py, for instance --prompts or --output-path.
# CHECKPOINT_DIR is what convert_llama3_8b.sh wrote.
set -euo pipefail

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/llama3_8b}

DISTRIBUTED_ARGS=(
    --standalone # one node; torchrun takes a free port
    --nproc_per_node "${GPUS_PER_NODE:-${TP_SIZE:-1}}"
)

INFERENCE_ARGS=(
    --load "$CHECKPOINT_PATH"
    --use-checkpoint-args
    --tensor-model-parallel-size "${TP_SIZE:-1}"
    --bf16
    --inference-max-requests 8
    --inference-max-seq-length 8192
    --temperature 1.0
    --top_k 1
    --num-tokens-to-generate 32
    --prompts "def main(" "The capital of France is"
)

exec torchrun "${DISTRIBUTED_ARGS[@]}" examples/inference/gpt/gpt_static_inference.py \
    "${INFERENCE_ARGS[@]}" "$@"
