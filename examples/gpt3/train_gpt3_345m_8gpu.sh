#!/usr/bin/env bash
# GPT-3 345M, data parallel on the 8 GPUs of one machine.
#
#   bash examples/gpt3/train_gpt3_345m_8gpu.sh \
#       CHECKPOINT_DIR TENSORBOARD_DIR VOCAB_FILE MERGE_FILE DATA_PREFIX [FLAGS...]
set -euo pipefail

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/gpt3_345m}
TENSORBOARD_LOGS_PATH=${GIVEN[1]:-tensorboard/gpt3_345m}
VOCAB_FILE=${GIVEN[2]:-data/gpt2-vocab.json}
MERGE_FILE=${GIVEN[3]:-data/gpt2-merges.txt}
DATA_PATH=${GIVEN[4]:-data/my-gpt_text_document}

torchrun --standalone --nproc_per_node "${GPUS_PER_NODE:-8}" pretrain_gpt.py \
    --num-layers 24 \
    --hidden-size 1024 \
    --num-attention-heads 16 \
    --seq-length 1024 \
    --max-position-embeddings 1024 \
    --micro-batch-size 8 \
    --global-batch-size 512 \
    --train-iters 100000 \
    --lr 3.0e-4 \
    --min-lr 3.0e-5 \
    --lr-decay-style cosine \
    --lr-warmup-iters 750 \
    --weight-decay 0.1 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --clip-grad 1.0 \
    --bf16 \
    --overlap-grad-reduce \
    --data-path "$DATA_PATH" \
    --vocab-file "$VOCAB_FILE" \
    --merge-file "$MERGE_FILE" \
    --split 969,30,1 \
    --log-interval 10 \
    --log-throughput \
    --save-interval 2000 \
    --eval-interval 1000 \
    --eval-iters 10 \
    --save "$CHECKPOINT_PATH" \
    --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH" \
    "$@"
