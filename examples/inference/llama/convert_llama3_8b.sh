#!/usr/bin/env bash
# Convert Llama 3 8B (or 3.1, 3.2) from Hugging Face's form, once, on one CPU; it needs no GPU.
#
#   bash examples/inference/llama/convert_llama3_8b.sh HF_DIR CHECKPOINT_DIR [FLAGS...]
#
# HF_DIR has config.json, *.safetensors and tokenizer.json.  The result loads in any layout.  FLAGS
# go to tools/checkpoint/convert.py, for instance --no-verify.
set -euo pipefail

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
HF_PATH=${GIVEN[0]:-checkpoints/llama3_8b_hf}
CHECKPOINT_PATH=${GIVEN[1]:-checkpoints/llama3_8b}

CONVERSION_ARGS=(
    --model-type GPT
    --loader llama_mistral
    --saver core
    --checkpoint-type hf
    --load-dir "$HF_PATH"
    --save-dir "$CHECKPOINT_PATH"
    --bf16
)

exec python tools/checkpoint/convert.py "${CONVERSION_ARGS[@]}" "$@"
