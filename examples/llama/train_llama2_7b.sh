#!/usr/bin/env bash
# Llama 2 7B on one machine of 8 GPUs: tensor parallel 2 with sequence parallel, data parallel 4.
#
#   bash examples/llama/train_llama2_7b.sh \
#       CHECKPOINT_DIR TENSORBOARD_DIR TOKENIZER_MODEL DATA_PREFIX [FLAGS...]
#
# TOKENIZER_MODEL is the SentencePiece file that comes with the model.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/llama2_7b}
TENSORBOARD_LOGS_PATH=${GIVEN[1]:-tensorboard/llama2_7b}
TOKENIZER_MODEL=${GIVEN[2]:-data/llama2/tokenizer.model}
DATA_PREFIX=${GIVEN[3]:-data/llama2_text_document}

torchrun --standalone --nproc_per_node "${GPUS_PER_NODE:-8}" pretrain_gpt.py \
    --tensor-model-parallel-size "${TP_SIZE:-2}" \
    --sequence-parallel \
    --num-layers 32 \
    --hidden-size 4096 \
    --ffn-hidden-size 11008 \
    --num-attention-heads 32 \
    --seq-length 4096 \
    --max-position-embeddings 4096 \
    --use-rotary-position-embeddings \
    --normalization RMSNorm \
    --swiglu \
    --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --attention-dropout 0 \
    --hidden-dropout 0 \
    --attention-softmax-in-fp32 \
    --micro-batch-size 1 \
    --global-batch-size 1024 \
    --train-iters 500000 \
    --lr 3.0e-4 \
    --min-lr 3.0e-5 \
    --lr-decay-style cosine \
    --lr-warmup-iters 2000 \
    --weight-decay 0.1 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --clip-grad 1.0 \
    --bf16 \
    --use-flash-attn \
    --tokenizer-type Llama2Tokenizer \
    --tokenizer-model "$TOKENIZER_MODEL" \
    --data-path "$DATA_PREFIX" \
    --split 990,9,1 \
    --log-interval 10 \
    --save-interval 1000 \
    --eval-interval 1000 \
    --eval-iters 10 \
    --save "$CHECKPOINT_PATH" \
    --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH" \
    "$@"
