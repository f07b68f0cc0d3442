#!/usr/bin/env bash
# ViT-B/16: name the class of an image, on the 8 GPUs of one machine.
#
#   bash examples/vision/train_vit_base_distributed.sh \
#       CHECKPOINT_DIR TENSORBOARD_DIR TRAIN_FOLDER VALID_FOLDER [FLAGS...]
#
# The last two hold a folder of images for each class, as ImageNet does (NUM_CLASSES=1000). The same
# command resumes from CHECKPOINT_DIR, also on another number of GPUs. FLAGS replace those below.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/vit_base}
TENSORBOARD_LOGS_PATH=${GIVEN[1]:-tensorboard/vit_base}
TRAIN_PATH=${GIVEN[2]:-data/imagenet/train}
VALID_PATH=${GIVEN[3]:-data/imagenet/val}

DISTRIBUTED_ARGS=(
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --nnodes "${NUM_NODES:-1}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)

VIT_MODEL_ARGS=(
    --num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --img-h 224
    --img-w 224
    --patch-dim 16
    --num-classes "${NUM_CLASSES:-1000}"
    --attention-backend auto
)

TRAINING_ARGS=(
    --micro-batch-size 64
    --global-batch-size 1024
    --train-iters 375000
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
    --lr 1e-3
    --lr-decay-style cosine
    --min-lr 1.0e-5
    --lr-warmup-iters 10000
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "${TP_SIZE:-1}"
    --pipeline-model-parallel-size "${PP_SIZE:-1}"
    --use-distributed-optimizer
)

DATA_ARGS=(
    --train-data-path "$TRAIN_PATH"
    --valid-data-path "$VALID_PATH"
    --num-workers 8
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_vision_classify.py \
    "${VIT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
