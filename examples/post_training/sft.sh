#!/usr/bin/env bash
# Fine-tune a model of Hugging Face on conversations, and write it for Hugging Face again.
#
#   bash examples/post_training/sft.sh MODEL CHATS [FOLDER]
#
# MODEL is a Hugging Face folder whose tokenizer has a chat template (else CHAT_TEMPLATE=file), CHATS
# a jsonl or parquet file with messages.  Everything is written under FOLDER, else under sft/.
# RANKS=8 TP=2 PP=1 use eight devices; SEQ_LENGTH, TRAIN_ITERS, BATCH and LR are settings of the run.
# LM_EVAL="--tasks hellaswag" evaluates the trained model with these flags of lm-eval.  PYTHON=...
# uses that environment as it is.
set -euo pipefail
model=$(realpath "$1")
chats=$(realpath "$2")
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/common.sh"
prepare sft "${@:3}"
train_iters=${TRAIN_ITERS:-100}
ranks=${RANKS:-1}

say "from Hugging Face"
"$python" tools/checkpoint/convert.py --from "$model" --to "$out/base"

say "fine-tuning"
flags=(
    --use-checkpoint-args
    --load "$out/base"
    --finetune
    --sft
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$model"
    ${CHAT_TEMPLATE:+--chat-template "$CHAT_TEMPLATE"}
    --data-path "$chats"
    --split 95,5,0
    --data-cache-path "$out/cache"
    --sft-show-sample
    --seq-length "${SEQ_LENGTH:-2048}"
    --micro-batch-size 1
    --global-batch-size "${BATCH:-16}"
    --train-iters "$train_iters"
    --lr "${LR:-1e-5}"
    --lr-decay-style cosine
    --lr-warmup-iters $((train_iters / 20))
    --weight-decay 0
    --clip-grad 1.0
    --attention-dropout 0
    --hidden-dropout 0
    --tensor-model-parallel-size "${TP:-1}"
    --pipeline-model-parallel-size "${PP:-1}"
    --use-distributed-optimizer
    --log-interval $((train_iters < 20 ? 1 : train_iters / 20))
    --eval-interval $((train_iters < 4 ? 1 : train_iters / 4))
    --eval-iters 2
    --metrics-file "$out/metrics.jsonl"
    --save "$out/tuned"
    ${EVAL_PROMPTS:+--eval-generate "$EVAL_PROMPTS"}
)
if ((ranks > 1)); then
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        pretrain_gpt.py "${flags[@]}"
else
    "$python" pretrain_gpt.py "${flags[@]}"
fi

if [[ -n ${LM_EVAL:-} ]]; then
    say "evaluation by lm-eval"
    read -ra asked <<< "$LM_EVAL"
    "$python" tools/run_lm_eval.py --model megatron --model_args "load=$out/tuned" "${asked[@]}"
fi

say "to Hugging Face"
"$python" tools/checkpoint/convert.py --from "$out/tuned" --to "$out/hf" --format hf

say "done in $((SECONDS - started_at_s)) s: AutoModelForCausalLM.from_pretrained(\"$out/hf\")"
