#!/usr/bin/env bash
# T5 220M (base): an encoder reads around hidden spans of words, a decoder writes them; on 8 GPUs.
#
#   bash examples/t5/train_t5_220m_distributed.sh \
#       CHECKPOINT_DIR TENSORBOARD_DIR VOCAB_FILE DATA_PREFIX [FLAGS...]
#
# VOCAB_FILE is a vocab.txt of word pieces; the sentinels of the spans are added to it.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/t5_220m}
TENSORBOARD_LOGS_PATH=${GIVEN[1]:-tensorboard/t5_220m}
VOCAB_FILE=${GIVEN[2]:-data/bert-large-cased-vocab.txt}
DATA_PATH=${GIVEN[3]:-data/my-t5_text_document}

DISTRIBUTED_ARGS=(
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --nnodes "${NUM_NODES:-1}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)

T5_MODEL_ARGS=(
    --encoder-num-layers 12
    --decoder-num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --kv-channels 64
    --ffn-hidden-size 3072
    --encoder-seq-length 512
    --decoder-seq-length 128
    --max-position-embeddings 512
    --init-method-std 0.015
    --attention-backend auto
)

TRAINING_ARGS=(
    --micro-batch-size "${MICRO_BATCH_SIZE:-64}"
    --global-batch-size "${GLOBAL_BATCH_SIZE:-512}"
    --train-iters 1000000
    --lr 0.0001
    --min-lr 0.00001
    --lr-decay-style linear
    --lr-decay-iters 1000000
    --lr-warmup-fraction .01
    --weight-decay 1e-2
    --clip-grad 1.0
    --bf16
    --use-distributed-optimizer
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "${TP_SIZE:-1}"
)

DATA_ARGS=(
    --tokenizer-type BertWordPieceCase
    --vocab-file "$VOCAB_FILE"
    --vocab-extra-ids 100
    --data-path "$DATA_PATH"
    --split 99982,9,9
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 500
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_t5.py \
    "${T5_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
