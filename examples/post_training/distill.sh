#!/usr/bin/env bash
# Prune a small GPT and train the rest towards it: with the teacher beside it, and from a store.
#
#   bash examples/post_training/distill.sh [FOLDER]  everything is written under FOLDER, else distill/
#
# Takes minutes on a CPU; PYTHON=... uses that environment as it is.
set -euo pipefail
out=$(realpath -m "${1:-distill}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash examples/post_training/prune.sh "$out"
train_iters=${DISTILL_ITERS:-200}
batch=${BATCH:-8}
python=$(tools/env.sh)
say() { printf '\n== %s\n' "$*"; }
quiet() { tee "$1" | grep --line-buffered '\] iteration\|loss at\|step  '; }

data=(
    --transformer-impl local
    --seq-length 256
    --micro-batch-size "$batch"
    --global-batch-size "$batch"
    --train-iters "$train_iters"
    --num-workers 1
    --train-data-path "$out/train_text_document"
    --valid-data-path "$out/valid_text_document"
    --data-cache-path "$out/cache"
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$out/tokenizer/vocab.json"
    --merge-file "$out/tokenizer/merges.txt"
    --use-checkpoint-args
    --finetune
    --lr 1e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --eval-interval "$train_iters"
    --eval-iters "${EVAL_ITERS:-10}"
    --log-interval 20
)

say "distillation with the teacher beside the student"
cat > "$out/kd.yaml" <<'YAML'
skip_lm_loss: false
kd_loss_scale: 1.0
logit_kl_temperature: 1.0
YAML
"$python" pretrain_gpt.py "${data[@]}" \
    --load "$out/student" \
    --export-kd-teacher-load "$out/teacher" \
    --export-kd-cfg "$out/kd.yaml" \
    --save "$out/distilled" \
    --save-interval 100 | quiet "$out/distilled.log"

say "a store of the teacher's 32 most probable tokens"
"$python" pretrain_gpt.py "${data[@]}" \
    --load "$out/teacher" \
    --logits-save-dir "$out/store" \
    --logits-save-top-k 32 | quiet "$out/store.log"

say "distillation from the store, without the teacher"
"$python" pretrain_gpt.py "${data[@]}" \
    --load "$out/student" \
    --logits-load-dir "$out/store" \
    --logits-load-kd-loss-alpha 0.5 \
    --save "$out/from-store" \
    --save-interval 100 | quiet "$out/from-store.log"

say "text of the distilled model"
"$python" tools/text_generation_cli.py --load "$out/distilled" --num-tokens 60 \
    --temperature 0.8 --top-k 40 --seed 1 --prompt "def "
