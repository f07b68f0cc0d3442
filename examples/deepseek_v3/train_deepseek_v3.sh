#!/usr/bin/env bash
# DeepSeek-V3, 671B with 37B active: tensor parallel 2, pipeline parallel 16 in two rounds, 64 ranks
# share the experts of a layer; run it on every node.
#
#   NUM_NODES=128 NODE_RANK=$SLURM_NODEID MASTER_ADDR=node0 \
#       bash examples/deepseek_v3/train_deepseek_v3.sh \
#       CHECKPOINT_DIR TENSORBOARD_DIR TOKENIZER DATA_PREFIX [FLAGS...]
#
# TOKENIZER is a Hugging Face tokenizer's name or folder.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/deepseek_v3}
TENSORBOARD_LOGS_PATH=${GIVEN[1]:-tensorboard/deepseek_v3}
TOKENIZER=${GIVEN[2]:-deepseek-ai/DeepSeek-V3-Base}
DATA_PATH=${GIVEN[3]:-data/deepseek_v3_text_document}

DISTRIBUTED_ARGS=(
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --nnodes "${NUM_NODES:-128}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)

MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --seq-length 4096
    --max-position-embeddings 4096
    --make-vocab-size-divisible-by 1280
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.006
    --mtp-num-layers 1
    --mtp-loss-scaling-factor 0.3
)

LATENT_ATTENTION_ARGS=(
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --qk-layernorm
    --position-embedding-type rope
    --rotary-base 10000
    --rotary-scaling-factor 40
    --mscale 1.0
    --mscale-all-dim 1.0
)

MOE_ARGS=(
    --num-experts 256
    --moe-layer-freq "([0]*3+[1]*58)"
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-topk 8
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --moe-router-topk-scaling-factor 2.5
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3
    --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --moe-grouped-gemm
    --moe-token-dispatcher-type flex
    --moe-enable-deepep
    --moe-permute-fusion
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 15360
    --rampup-batch-size 3072 3072 114501953
    --train-samples 3613281250
    --lr 2.2e-4
    --min-lr 7.3e-6
    --lr-decay-style cosine
    --lr-warmup-samples 6144000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --recompute-granularity selective
    --recompute-modules mla_up_proj mlp moe layernorm
)

# Two chunks a rank of two layers each; the last two hold one layer, and the layer for the token
# ahead with the output.
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 16
    --pipeline-model-parallel-layout "Ett|(tt|)*29t|mL"
    --expert-model-parallel-size 64
    --expert-tensor-parallel-size 1
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

DATA_ARGS=(
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER"
    --data-path "$DATA_PATH"
    --split 99,1,0
    --no-create-attention-mask-in-dataloader
)

LOGGING_ARGS=(
    --log-interval 1
    --log-throughput
    --save-interval 500
    --eval-interval 500
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${LATENT_ATTENTION_ARGS[@]}" \
    "${MOE_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
