#!/usr/bin/env bash
# Countdown by reinforcement learning: a model that knows the form of answers learns to be right.
#
#   bash examples/post_training/grpo.sh [FOLDER]     everything is written under FOLDER, else grpo/
#
# Takes minutes on a CPU; PYTHON=... uses that environment as it is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/common.sh"
prepare grpo "$@"
warmup_iters=${WARMUP_ITERS:-200}
train_iters=${TRAIN_ITERS:-250}

say "problems with random answers, and a small tokenizer"
once problems "$python" -m examples.post_training.countdown --output "$out/warmup.jsonl" \
    --count 20000
once tokenizer "$python" tools/train_tokenizer.py --input "$out/warmup.jsonl" \
    --output-dir "$out/tokenizer" --vocab-size 300
tokenizer=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$out/tokenizer/vocab.json"
    --merge-file "$out/tokenizer/merges.txt"
)
once tokens "$python" tools/preprocess_data.py --input "$out/warmup.jsonl" \
    --output-prefix "$out/warmup" "${tokenizer[@]}" --append-eod --workers "$workers"

model=(
    --num-layers 2
    --hidden-size 64
    --num-attention-heads 4
    --seq-length 32
    --max-position-embeddings 32
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --attention-dropout 0
    --hidden-dropout 0
    --lr-decay-style constant
    --device auto
    "${tokenizer[@]}"
)

say "warm-up: the form of an answer"
"$python" pretrain_gpt.py "${model[@]}" \
    --data-path "$out/warmup_text_document" \
    --split 99,1,0 \
    --reset-attention-mask \
    --reset-position-ids \
    --micro-batch-size 32 \
    --global-batch-size 32 \
    --train-iters "$warmup_iters" \
    --lr 3e-3 \
    --eval-interval 1000 \
    --log-interval 50 \
    --load "$out/warmup" \
    --save "$out/warmup"

say "reinforcement learning: the right answer"
cat > "$out/environments.yaml" <<'YAML'
- agent_type: examples.post_training.countdown:Countdown
  agent_args: {count: 500}
YAML
"$python" pretrain_rl.py "${model[@]}" \
    --load "$out/warmup" \
    --finetune \
    --langrl-env-config "$out/environments.yaml" \
    --grpo-prompts-per-step 32 \
    --grpo-group-size 8 \
    --grpo-iterations 1 \
    --grpo-kl-beta 0.001 \
    --grpo-clamp-eps-lower 0.2 \
    --grpo-clamp-eps-upper 0.2 \
    --rl-max-response-length 8 \
    --micro-batch-size 64 \
    --global-batch-size 256 \
    --train-iters "$train_iters" \
    --lr 1e-3 \
    --log-interval 10 \
    --metrics-file "$out/metrics.jsonl" \
    --save "$out/policy" \
    --save-interval 50

say "text"
"$python" tools/text_generation_cli.py --load "$out/policy" --num-tokens 8 --temperature 0 \
    --prompt "7 3 = 21:"

say "done in $((SECONDS - started_at_s)) s"
