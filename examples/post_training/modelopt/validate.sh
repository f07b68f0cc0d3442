#!/usr/bin/env bash
# Report the acceptance rate of draft heads: MLM_MODEL_LOAD=... PROMPTS_PATH=FILE validate.sh
# conf/arguments.sh lists the variables; STEPS, OSL, GROUND_TRUTH_PATH and SAVE_GROUND_TRUTH_PATH
# belong to this script.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/conf/arguments.sh"
truth=(
    ${GROUND_TRUTH_PATH:+--ground-truth-path "$GROUND_TRUTH_PATH"}
    ${SAVE_GROUND_TRUTH_PATH:+--save-ground-truth-path "$SAVE_GROUND_TRUTH_PATH"}
)
start validate --load "${MLM_MODEL_LOAD:-$HF_MODEL_CKPT}" --prompts-path "${PROMPTS_PATH:?}" \
    --steps "${STEPS:-1}" --osl "${OSL:-64}" "${truth[@]}"
