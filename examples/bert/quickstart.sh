#!/usr/bin/env bash
# From a clone to a trained BERT: word pieces, sentences, training, resuming, its two losses.
#
#   bash examples/bert/quickstart.sh [FOLDER]     everything is written under FOLDER, else quickstart_bert/
#
# On a GPU when there is one, else on the CPU; PYTHON=... uses that environment as it is.
set -euo pipefail
train_iters=${TRAIN_ITERS:-400}
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/common.sh"
begin quickstart_bert "$@"
word_pieces

train pretrain_bert.py \
    --num-layers 4 \
    --hidden-size 192 \
    --num-attention-heads 6 \
    --seq-length 128 \
    --max-position-embeddings 128 \
    --micro-batch-size 32 \
    --global-batch-size 32 \
    --lr 2e-3 \
    --min-lr 2e-4

compare bert
finish
