#!/usr/bin/env bash
# Qwen2 7B on one machine of 8 GPUs: tensor parallel 4 with sequence parallel, data parallel 2.
#
#   bash examples/qwen/train_qwen2_7b.sh \
#       CHECKPOINT_DIR TENSORBOARD_DIR TOKENIZER DATA_PREFIX [FLAGS...]
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/qwen2_7b}
TENSORBOARD_LOGS_PATH=${GIVEN[1]:-tensorboard/qwen2_7b}
TOKENIZER=${GIVEN[2]:-Qwen/Qwen2-7B}
DATA_PREFIX=${GIVEN[3]:-data/qwen2_text_document}

torchrun --standalone --nproc_per_node "${GPUS_PER_NODE:-8}" pretrain_gpt.py \
    --tensor-model-parallel-size "${TP_SIZE:-4}" \
    --sequence-parallel \
    --num-layers 28 \
    --hidden-size 3584 \
    --ffn-hidden-size 18944 \
    --num-attention-heads 28 \
    --group-query-attention \
    --num-query-groups 4 \
    --seq-length 4096 \
    --max-position-embeddings 32768 \
    --position-embedding-type rope \
    --rotary-base 1000000 \
    --normalization RMSNorm \
    --norm-epsilon 1e-6 \
    --swiglu \
    --disable-bias-linear \
    --add-qkv-bias \
    --untie-embeddings-and-output-weights \
    --attention-dropout 0.0 \
    --hidden-dropout 0.0 \
    --make-vocab-size-divisible-by 128 \
    --micro-batch-size 1 \
    --global-batch-size 256 \
    --train-iters 100000 \
    --lr 1.0e-5 \
    --min-lr 1.0e-6 \
    --lr-decay-style WSD \
    --lr-wsd-decay-style exponential \
    --lr-wsd-decay-iters 10000 \
    --lr-warmup-iters 500 \
    --weight-decay 0.1 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --clip-grad 1.0 \
    --bf16 \
    --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model "$TOKENIZER" \
    --data-path "$DATA_PREFIX" \
    --split 99,1,0 \
    --log-interval 10 \
    --save-interval 1000 \
    --eval-interval 500 \
    --eval-iters 10 \
    --save "$CHECKPOINT_PATH" \
    --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH" \
    "$@"
