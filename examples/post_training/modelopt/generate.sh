#!/usr/bin/env bash
# Answer conversations with a checkpoint: MLM_MODEL_LOAD=... generate.sh
# conf/arguments.sh lists the variables; PROMPTS_PATH, OSL and DRAFT_LEN belong to this script.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/conf/arguments.sh"
prompts=(${PROMPTS_PATH:+--finetune-hf-dataset "$PROMPTS_PATH"})
start generate --load "${MLM_MODEL_LOAD:-$HF_MODEL_CKPT}" "${prompts[@]}" \
    --osl "${OSL:-128}" --draft-length "${DRAFT_LEN:-0}"
