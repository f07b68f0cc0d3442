#!/usr/bin/env bash
# Fine-tune a checkpoint on conversations: MLM_MODEL_LOAD=... DATASET=FILE finetune.sh
# conf/arguments.sh lists the variables; MLM_DATA_ARGS, MLM_TRAIN_ARGS, MLM_OPTIM_ARGS and
# MLM_EVAL_ARGS replace the flags below.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/conf/arguments.sh"
data="--train-samples 128000 --lr-decay-samples 128000 --split 100,0,0"
train="--micro-batch-size 1 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0"
optim="--lr 5e-5 --min-lr 1e-7 --lr-decay-style cosine --clip-grad 1 --weight-decay 0 --adam-beta2 0.95"
eval="--eval-iters 0 --save-interval 1000 --log-interval 100"
words="${MLM_DATA_ARGS:-$data} ${MLM_TRAIN_ARGS:-$train} ${MLM_OPTIM_ARGS:-$optim} ${MLM_EVAL_ARGS:-$eval}"
read -ra flags <<<"$words"
start finetune --load "${MLM_MODEL_LOAD:-$HF_MODEL_CKPT}" --finetune-hf-dataset "${DATASET:?}" \
    --save "${MLM_MODEL_SAVE:-$MLM_WORK_DIR/${name}_sft}" "${flags[@]}"
