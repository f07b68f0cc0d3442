#!/usr/bin/env bash
# Write a checkpoint as a Hugging Face folder: MLM_MODEL_LOAD=... EXPORT_DIR=FOLDER export.sh
# conf/arguments.sh lists the variables. One process is enough for every layout.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/conf/arguments.sh"
beside=(${HF_MODEL_CKPT:+--pretrained-model-name "$HF_MODEL_CKPT"})
start export --load "${MLM_MODEL_LOAD:?}" "${beside[@]}" \
    --export-dir "${EXPORT_DIR:-$MLM_WORK_DIR/${name}_export}"
