#!/usr/bin/env bash
# Fine-tune a model of Hugging Face on conversations, and write it for Hugging Face again.
#
#   bash examples/post_training/sft.sh MODEL CHATS [FOLDER]
#
# MODEL is a Hugging Face folder whose tokenizer has a chat template (else CHAT_TEMPLATE=file), CHATS
# a jsonl or parquet file with messages.  Everything is written under FOLDER, else under sft/.
# RANKS=8 TP=2 PP=1 use eight devices; SEQ_LENGTH, TRAIN_ITERS, BATCH and LR are settings of the run.
# PRECISION is bf16 (default), or fp32 for weights in fp32.  LM_EVAL="--tasks hellaswag" evaluates the
# trained model with these flags of lm-eval.  PYTHON=... uses that environment as it is.
set -euo pipefail
model=$(realpath "$1")
chats=$(realpath "$2")
source "$(dirname "${BASH_SOURCE[0]}")/tune.sh"
prepare sft "${@:3}"

say "fine-tuning"
once tuned tune 1e-5 \
    --sft \
    --data-path "$chats" \
    --sft-show-sample \
    ${EVAL_PROMPTS:+--eval-generate "$EVAL_PROMPTS"}

evaluate

say "done in $((SECONDS - started_at_s)) s: AutoModelForCausalLM.from_pretrained(\"$out/hf\")"
