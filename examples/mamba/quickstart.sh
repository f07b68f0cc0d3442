#!/usr/bin/env bash
# From a clone to a trained Mamba-2 with an attention layer: training, resuming, text.
#
#   bash examples/mamba/quickstart.sh [FOLDER]     everything is written under FOLDER, else quickstart_mamba/
#
# On a GPU when there is one, else on the CPU; PYTHON=... uses that environment as it is.
set -euo pipefail
train_iters=${TRAIN_ITERS:-400}
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/common.sh"
begin quickstart_mamba "$@"
byte_pairs

train pretrain_mamba.py \
    --num-layers 6 \
    --hybrid-override-pattern "MM-*M-" \
    --hidden-size 192 \
    --num-attention-heads 6 \
    --mamba-state-dim 32 \
    --mamba-head-dim 32 \
    --mamba-num-groups 1 \
    --seq-length 256 \
    --max-position-embeddings 256 \
    --position-embedding-type none \
    --normalization RMSNorm \
    --disable-bias-linear \
    --micro-batch-size 8 \
    --global-batch-size 8 \
    --lr 3e-3 \
    --min-lr 3e-4 \
    --no-create-attention-mask-in-dataloader

compare mamba 0.5

say "text"
"$python" tools/text_generation_cli.py --load "$out/checkpoints" --num-tokens 80 \
    --temperature 0.8 --top-k 40 --seed 1 --prompt "def "

finish
