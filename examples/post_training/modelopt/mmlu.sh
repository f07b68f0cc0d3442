#!/usr/bin/env bash
# Score a checkpoint on MMLU: MLM_MODEL_LOAD=... MMLU_DATASET=FOLDER mmlu.sh
# conf/arguments.sh lists the variables; LOWER_BOUND and PERCENTAGE belong to this script.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/conf/arguments.sh"
bound=(${LOWER_BOUND:+--lower-bound "$LOWER_BOUND"})
start mmlu --load "${MLM_MODEL_LOAD:-$HF_MODEL_CKPT}" --disable-tqdm "${bound[@]}" \
    --mmlu-dataset "${MMLU_DATASET:-cais/mmlu}" --percentage "${PERCENTAGE:-1.0}"
