#!/usr/bin/env bash
# From a clone to a model that says what it sees: pictures, tokenizer, training, resuming, answers.
#
#   bash examples/multimodal/quickstart.sh [FOLDER]     everything is written under FOLDER
#
# On a GPU when there is one, else on the CPU; PYTHON=... uses that environment as it is.
set -euo pipefail
train_iters=${TRAIN_ITERS:-1200}
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/common.sh"
prepare quickstart_multimodal "$@"

say "pictures of shapes and digits, with captions"
once samples "$python" examples/multimodal/quickstart/draw_samples.py "$out"
tokenizer=(
    --tokenizer-type MultimodalTokenizer
    --tokenizer-model "$out/tokenizer"
    --tokenizer-prompt-format qwen2p5
)
data=(--train-data-path "$out/train.tar" --valid-data-path "$out/valid.tar")

train pretrain_vlm.py \
    --num-layers 2 \
    --hidden-size 128 \
    --num-attention-heads 4 \
    --position-embedding-type rope \
    --normalization RMSNorm \
    --swiglu \
    --disable-bias-linear \
    --vision-model-type clip \
    --vision-num-layers 4 \
    --vision-hidden-size 128 \
    --vision-num-attention-heads 4 \
    --img-h 48 \
    --img-w 48 \
    --patch-dim 8 \
    --disable-vision-class-token \
    --dataloader-seq-length 32 \
    --seq-length 32 \
    --micro-batch-size 32 \
    --global-batch-size 32 \
    --lr 2e-3 \
    --min-lr 2e-4

say "what it sees in pictures that it has not seen"
"$python" examples/multimodal/quickstart/look.py "$out/checkpoints" "$out/valid.tar" \
    "$out/answers.png" "${LEAST_ACCURACY:-0.5}"

finish
