#!/usr/bin/env bash
# Write a Hugging Face folder as a checkpoint: HF_MODEL_CKPT=... MLM_MODEL_SAVE=... convert.sh
# conf/arguments.sh lists the variables. MLM_EXTRA_ARGS="--export-num-medusa-heads 4" adds heads.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/conf/arguments.sh"
start convert_model "${model[@]}" --save "${MLM_MODEL_SAVE:-$MLM_WORK_DIR/${name}_mlm}"
