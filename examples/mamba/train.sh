#!/usr/bin/env bash
# A hybrid of Mamba-2, attention and MLP layers, 8B or (MODEL_SCALE=800M) smaller, on 8 GPUs.
#
#   bash examples/mamba/train.sh \
#       DATA_PREFIX TOKENIZER_MODEL [CHECKPOINT_DIR] [TENSORBOARD_DIR] [FLAGS...]
#
# TOKENIZER_MODEL is a SentencePiece file.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

MODEL_SCALE=${MODEL_SCALE:-8B}
GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
DATA_PATH=${GIVEN[0]:-data/mamba_text_document}
TOKENIZER_MODEL=${GIVEN[1]:-data/mamba/tokenizer.model}
CHECKPOINT_PATH=${GIVEN[2]:-checkpoints/mamba_hybrid_$MODEL_SCALE}
TENSORBOARD_LOGS_PATH=${GIVEN[3]:-tensorboard/mamba_hybrid_$MODEL_SCALE}

case $MODEL_SCALE in
800M) SIZES=(--num-layers 48 --hidden-size 1024 --num-attention-heads 16) TP=1 ;;
8B) SIZES=(--num-layers 56 --hidden-size 4096 --num-attention-heads 32) TP=4 ;;
*)
    echo "MODEL_SCALE=$MODEL_SCALE: 800M or 8B" >&2
    exit 1
    ;;
esac

DISTRIBUTED_ARGS=(
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --nnodes "${NUM_NODES:-1}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)

MODEL_ARGS=(
    "${SIZES[@]}"
    --is-hybrid-model
    --hybrid-attention-ratio 0.08
    --hybrid-mlp-ratio 0.5
    --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec
    --mamba-state-dim 128
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type none
    --normalization RMSNorm
    --squared-relu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.0134
)

# 200 B tokens in samples of 4,096; the first thousandth of them warms up.
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 128
    --train-samples 48828125
    --lr-warmup-samples 50000
    --lr-decay-samples 48778125
    --lr 2.5e-4
    --min-lr 2.5e-5
    --lr-decay-style cosine
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "${TP_SIZE:-$TP}"
    --pipeline-model-parallel-size "${PP_SIZE:-1}"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
if ((${TP_SIZE:-$TP} > 1)); then
    MODEL_PARALLEL_ARGS+=(--sequence-parallel)
fi

DATA_ARGS=(
    --tokenizer-type GPTSentencePieceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --data-path "$DATA_PATH"
    --split 99,1,0
    --no-create-attention-mask-in-dataloader
)

LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --save-interval 2000
    --eval-interval 2000
    --eval-iters 32
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_mamba.py \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
