#!/usr/bin/env bash
# Generate text with a Mamba-2 model, or a hybrid, of 8B parameters on 8 GPUs.
#
#   bash examples/inference/mamba/mamba_static_inference_8b.sh CHECKPOINT_DIR [FLAGS...]
#
# FLAGS go to examples/inference/mamba/mamba_static_inference.py, for instance --prompts or --output-path.
set -euo pipefail

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/mamba_8b}

DISTRIBUTED_ARGS=(
    --standalone # one node; torchrun takes a free port
    --nproc_per_node "${GPUS_PER_NODE:-${TP_SIZE:-8}}"
)

INFERENCE_ARGS=(
    --load "$CHECKPOINT_PATH"
    --use-checkpoint-args
    --tensor-model-parallel-size "${TP_SIZE:-8}"
    --inference-max-requests 8
    --inference-max-seq-length 4096
    --temperature 1.0
    --top_k 1
    --num-tokens-to-generate 32
    --prompts "def main(" "The capital of France is"
)

exec torchrun "${DISTRIBUTED_ARGS[@]}" examples/inference/mamba/mamba_static_inference.py \
    "${INFERENCE_ARGS[@]}" "$@"
