#!/usr/bin/env bash
# A tiny MiMo model on mock data, on one GPU or (--device cpu as argument) a CPU.
#
#   bash examples/mimo/scripts/run_mock_train.sh [FLAGS]
set -euo pipefail

torchrun --nproc_per_node "${GPUS_PER_NODE:-1}" examples/mimo/train.py \
    --model-provider mock --dataset-provider mock \
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 \
    --total-seq-length 512 --seq-length 512 --max-position-embeddings 512 \
    --image-size 224 \
    --tokenizer-type NullTokenizer --vocab-size 32000 \
    --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 1e-4 \
    --eval-iters 2 --eval-interval 10 --log-interval 1 "$@"
