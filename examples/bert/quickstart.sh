#!/usr/bin/env bash
# From a clone to a trained BERT: word pieces, sentences, training, resuming, its two losses.
#
#   bash examples/bert/quickstart.sh [FOLDER]     everything is written under FOLDER, else quickstart_bert/
#
# On a GPU when there is one, else on the CPU; PYTHON=... uses that environment as it is.
set -euo pipefail
train_iters=${TRAIN_ITERS:-800}
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/common.sh"
begin quickstart_bert "$@"
word_pieces

train pretrain_bert.py \
    --num-layers 3 \
    --hidden-size 128 \
    --num-attention-heads 4 \
    --seq-length 128 \
    --max-position-embeddings 128 \
    --position-embedding-type rope \
    --mask-prob 0.2 \
    --normalization RMSNorm \
    --swiglu \
    --disable-bias-linear \
    --micro-batch-size 16 \
    --global-batch-size 16 \
    --lr 5e-3 \
    --min-lr 5e-4

compare bert 0.1
finish
