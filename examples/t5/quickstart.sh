#!/usr/bin/env bash
# From a clone to a trained T5: word pieces, sentences, training, resuming, its loss.
#
#   bash examples/t5/quickstart.sh [FOLDER]     everything is written under FOLDER, else quickstart_t5/
#
# On a GPU when there is one, else on the CPU; PYTHON=... uses that environment as it is.
set -euo pipefail
train_iters=${TRAIN_ITERS:-400}
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/common.sh"
begin quickstart_t5 "$@"
word_pieces --vocab-extra-ids 100

train pretrain_t5.py \
    --encoder-num-layers 3 \
    --decoder-num-layers 3 \
    --hidden-size 192 \
    --num-attention-heads 6 \
    --encoder-seq-length 128 \
    --decoder-seq-length 64 \
    --max-position-embeddings 128 \
    --micro-batch-size 16 \
    --global-batch-size 16 \
    --lr 2e-3 \
    --min-lr 2e-4

compare t5 0.5
finish
