#!/usr/bin/env bash
# Prune a Hugging Face folder or a checkpoint: HF_MODEL_CKPT=... TARGET_NUM_LAYERS=24 prune.sh
# conf/arguments.sh lists the variables. Sizes: TARGET_FFN_HIDDEN_SIZE, TARGET_HIDDEN_SIZE,
# TARGET_NUM_ATTENTION_HEADS, TARGET_NUM_QUERY_GROUPS, TARGET_NUM_MOE_EXPERTS, TARGET_NUM_LAYERS, or
# LAYERS_TO_DROP (such as 3,4). MLM_DATA_ARGS (--data-path ...) names the calibration samples.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/conf/arguments.sh"
read -ra flags <<<"${MLM_DATA_ARGS:-}"
for size in HIDDEN_SIZE FFN_HIDDEN_SIZE NUM_ATTENTION_HEADS NUM_QUERY_GROUPS NUM_MOE_EXPERTS NUM_LAYERS; do
    variable=TARGET_$size
    flag=--${variable,,}
    if [[ -n ${!variable:-} ]]; then flags+=("${flag//_/-}" "${!variable}"); fi
done
if [[ -n ${LAYERS_TO_DROP:-} ]]; then flags+=(--layers-to-drop ${LAYERS_TO_DROP//,/ }); fi
start prune "${model[@]}" --calib-size "${CALIB_SIZE:-1024}" "${flags[@]}" \
    --save "${MLM_MODEL_SAVE:-$MLM_WORK_DIR/${name}_pruned}"
