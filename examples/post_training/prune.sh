#!/usr/bin/env bash
# Train a small GPT, prune it to half of its parameters by importance, and compare the losses.
#
#   bash examples/post_training/prune.sh [FOLDER]    everything is written under FOLDER, else prune/
#
# Takes minutes on a CPU; PYTHON=... uses that environment as it is.
set -euo pipefail
train_iters=${TRAIN_ITERS:-400}
eval_iters=${EVAL_ITERS:-10}
batch=${BATCH:-8}
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/common.sh"
begin prune "$@"
byte_pairs
common=(
    --transformer-impl local
    --seq-length 256
    --micro-batch-size "$batch"
    --global-batch-size "$batch"
    --num-workers 1
    --data-cache-path "$out/cache"
    "${tokenizer[@]}"
    "${data[@]}"
)

say "a model to prune"
"$python" pretrain_gpt.py "${common[@]}" \
    --num-layers 6 \
    --hidden-size 192 \
    --num-attention-heads 6 \
    --max-position-embeddings 256 \
    --position-embedding-type rope \
    --normalization RMSNorm \
    --swiglu \
    --disable-bias-linear \
    --attention-dropout 0 \
    --hidden-dropout 0 \
    --train-iters "$train_iters" \
    --lr 3e-3 \
    --min-lr 3e-4 \
    --lr-decay-style cosine \
    --eval-interval "$train_iters" \
    --eval-iters "$eval_iters" \
    --log-interval 50 \
    --load "$out/teacher" \
    --save "$out/teacher" \
    --save-interval 100 | tee "$out/teacher.log" | grep -v '\.\.\.\.'

say "pruned: fewer layers, heads, neurons and hidden channels"
once student "$python" tools/prune.py "${common[@]}" \
    --load "$out/teacher" \
    --save "$out/student" \
    --calib-size "${CALIB_SIZE:-128}" \
    --pruning-scores-path "$out/scores.json" \
    --target-num-layers 4 \
    --target-hidden-size 160 \
    --target-ffn-hidden-size 384 \
    --target-num-attention-heads 4 | tee "$out/prune.log" | grep -v '\.\.\.\.'

say "the loss of the pruned model, before any training"
"$python" pretrain_gpt.py "${common[@]}" \
    --use-checkpoint-args \
    --load "$out/student" \
    --finetune \
    --skip-train \
    --eval-iters "$eval_iters" | tee "$out/pruned.log" | grep 'loss at'

say "done in $((SECONDS - started_at_s)) s; distill.sh trains the pruned model towards the complete one"
