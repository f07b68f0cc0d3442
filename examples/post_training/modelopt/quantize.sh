#!/usr/bin/env bash
# Calibrate and quantize: HF_MODEL_CKPT=... CALIB_DATA=texts.jsonl quantize.sh MODEL_NAME RECIPE
# conf/arguments.sh lists the variables; CALIB_DATA (or MLM_DATA_ARGS="--data-path ..."), CALIB_SIZE,
# MLM_PROMPTS and MLM_REF_LABEL belong to this script alone.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/conf/arguments.sh"
read -ra data <<<"${MLM_DATA_ARGS:-}"
data+=(${CALIB_DATA:+--calib-data "$CALIB_DATA"})
start quantize "${model[@]}" --export-quant-cfg "${2:-None}" "${data[@]}" \
    --calib-size "${CALIB_SIZE:-512}" --save "${MLM_MODEL_SAVE:-$MLM_WORK_DIR/${name}_quant}" \
    --prompts "${MLM_PROMPTS-Hello!|Born in California, Soyer trained as a}" \
    --references "${MLM_REF_LABEL:-}"
