#!/usr/bin/env bash
# Mixtral 8x7B: pipeline parallel 4, one expert of a layer on each of 8 ranks; run it on every node.
#
#   NUM_NODES=4 NODE_RANK=$SLURM_NODEID MASTER_ADDR=node0 \
#       bash examples/mixtral/train_mixtral_8x7b_distributed.sh \
#       CHECKPOINT_DIR TOKENIZER_MODEL DATA_PREFIX [TENSORBOARD_DIR] [FLAGS...]
#
# TOKENIZER_MODEL is the SentencePiece file that comes with the model.  WANDB_API_KEY, when set,
# sends the curves to Weights & Biases as well.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/mixtral_8x7b}
TOKENIZER_MODEL=${GIVEN[1]:-data/mixtral/tokenizer.model}
DATA_PATH=${GIVEN[2]:-data/mixtral_text_document}
TENSORBOARD_LOGS_PATH=${GIVEN[3]:-tensorboard/mixtral_8x7b}

DISTRIBUTED_ARGS=(
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --nnodes "${NUM_NODES:-4}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 32768
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.01
)

MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 500000
    --lr 1.0e-4
    --min-lr 1.0e-5
    --lr-decay-style cosine
    --lr-decay-iters 320000
    --lr-warmup-iters 500
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
    --recompute-granularity selective
    --recompute-modules layernorm moe_act
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "${TP_SIZE:-1}"
    --pipeline-model-parallel-size "${PP_SIZE:-4}"
    --num-layers-per-virtual-pipeline-stage 4
    --expert-model-parallel-size "${EP_SIZE:-8}"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
if ((${TP_SIZE:-1} > 1)); then
    MODEL_PARALLEL_ARGS+=(--sequence-parallel)
fi

DATA_ARGS=(
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --data-path "$DATA_PATH"
    --split 99990,8,2
)

LOGGING_ARGS=(
    --log-interval 1
    --log-throughput
    --save-interval 10000
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
)
if [[ -n "${WANDB_API_KEY:-}" ]]; then
    LOGGING_ARGS+=(
        --wandb-project "${WANDB_PROJECT:-mixtral}"
        --wandb-exp-name "${WANDB_NAME:-mixtral_8x7b}"
    )
fi

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${MOE_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
