#!/usr/bin/env bash
# Train a model of Hugging Face on pairs of answers, and write it for Hugging Face again.
#
#   bash examples/post_training/dpo.sh MODEL PAIRS [FOLDER]
#
# MODEL is a Hugging Face folder, whose tokenizer has a chat template (else CHAT_TEMPLATE=file) if
# pairs are messages; PAIRS is a jsonl or parquet file with prompt, chosen and rejected.  Everything
# is written under FOLDER, else under dpo/.  REWARD=1 trains a reward model instead.
# RANKS=8 TP=2 PP=1 use eight devices; SEQ_LENGTH, TRAIN_ITERS, BATCH, LR and BETA are settings of the
# run.  PRECISION is bf16 (default), or fp32 for weights in fp32.  LM_EVAL="--tasks hellaswag"
# evaluates the trained model with these flags of lm-eval.  PYTHON=... uses that environment as it is.
set -euo pipefail
model=$(realpath "$1")
pairs=$(realpath "$2")
source "$(dirname "${BASH_SOURCE[0]}")/tune.sh"
prepare dpo "${@:3}"

say "training on pairs"
objective=(--dpo-beta "${BETA:-0.1}")
if [[ ${REWARD:-0} == 1 ]]; then
    objective=(--reward-model)
fi
once tuned tune 1e-6 "${objective[@]}" --data-path "$pairs"

if [[ ${REWARD:-0} != 1 ]]; then
    evaluate
fi

say "done in $((SECONDS - started_at_s)) s: the trained model is in $out/hf"
