# What the quickstarts share; each sets `train_iters`, sources this, and says what is its own.
#
#   bash examples/.../quickstart.sh [FOLDER]     everything is written under FOLDER
#
# The same command continues what an earlier one did not finish; another FOLDER starts anew.
# On a GPU when there is one, else on the CPU; PYTHON=... uses that environment as it is.

say() { printf '\n== %s\n' "$*"; }

# begin DEFAULT_FOLDER [FOLDER]: what `prepare` does, and a corpus of text.
begin() {
    prepare "$@"
    say "corpus: the text of the installed Python standard library"
    once corpus "$python" examples/quickstart/corpus.py "$out"
}

# once STEP COMMAND...: runs a command, unless an earlier run of the script has finished it.
once() {
    if [[ -e $out/.finished-$1 ]]; then
        echo "finished by an earlier run: $1"
        return
    fi
    "${@:2}" && touch "$out/.finished-$1"
}

# prepare DEFAULT_FOLDER [FOLDER]: the folder `out`, new or of an earlier run, and the environment.
prepare() {
    out=${2:+$(realpath -m "$2")}
    cd "$(dirname "${BASH_SOURCE[0]}")/../.."
    out=${out:-$1}
    workers=$(($(nproc) < 8 ? $(nproc) : 8))

    say "environment"
    python=$(EXTRAS=${EXTRAS:-hf,images,serve} tools/env.sh)  # without the developers' tools
    started_at_s=$SECONDS
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$workers}
    # Threads that wait sleep instead of spinning: five times faster where the cores are shared.
    export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

    if [[ -e $out && ! -e $out/.quickstart ]]; then
        echo "$out exists and was not made by this script: name another folder" >&2
        exit 1
    fi
    mkdir -p "$out"
    touch "$out/.quickstart"
}

# byte_pairs: a tokenizer, and token files of whole documents.
byte_pairs() {
    say "tokenizer: byte-level BPE of 4096 ids"
    once tokenizer "$python" tools/train_tokenizer.py --input "$out/train.jsonl" \
        --output-dir "$out/tokenizer" --vocab-size 4096
    tokenizer=(
        --tokenizer-type GPT2BPETokenizer
        --vocab-file "$out/tokenizer/vocab.json"
        --merge-file "$out/tokenizer/merges.txt"
    )
    token_files document --append-eod
}

# word_pieces [FLAGS]: a tokenizer, and token files of sentences.
word_pieces() {
    say "tokenizer: 4096 word pieces"
    once tokenizer "$python" tools/train_tokenizer.py --input "$out/train.jsonl" \
        --output-dir "$out/tokenizer" --vocab-size 4096 --model-type wordpiece
    tokenizer=(
        --tokenizer-type BertWordPieceLowerCase
        --vocab-file "$out/tokenizer/vocab.txt"
        "$@"
    )
    token_files sentence --split-sentences
}

# token_files LEVEL FLAGS: `data` names what was written.
token_files() {
    say "token files"
    for part in train valid; do
        once "$part" "$python" tools/preprocess_data.py --input "$out/$part.jsonl" \
            --output-prefix "$out/$part" "${tokenizer[@]}" "${@:2}" --workers "$workers"
    done
    data=(--train-data-path "$out/train_text_$1" --valid-data-path "$out/valid_text_$1")
}

# train PROGRAM FLAGS: trains half of the iterations, saves, and goes on from the checkpoint.
train() {
    say "training, first half: it stops and saves at iteration $((train_iters / 2))"
    train_once "$@" --exit-interval $((train_iters / 2))
    say "training, second half: it goes on from the checkpoint"
    train_once "$@"
}

train_once() {
    flags=(
        --transformer-impl local
        --attention-dropout 0
        --hidden-dropout 0
        --train-iters "$train_iters"
        --lr-decay-style cosine
        --lr-warmup-iters $((train_iters < 80 ? train_iters / 4 : 20))
        --weight-decay 0.1
        --adam-beta2 0.95
        --clip-grad 1.0
        "${tokenizer[@]}"
        "${data[@]}"
        --data-cache-path "$out/cache"
        --num-workers 1
        --log-interval 20
        --log-throughput
        --eval-interval $((train_iters / 4))
        --eval-iters 10
        --save "$out/checkpoints"
        --load "$out/checkpoints"
        --save-interval $((train_iters / 4))
        --tensorboard-dir "$out/tensorboard"
        --log-validation-ppl-to-tensorboard
        "${@:2}"
    )
    "$python" "$1" "${flags[@]}" 2>&1 | tee -a "$out/train.log" |
        sed -u '/-- arguments --/,/-- end of arguments --/d'
}

# compare KIND LEAD: the loss beside that of a model without context, in nats a token.
compare() {
    say "loss"
    "$python" examples/quickstart/unigram.py "$out/train.log" "$2" --model-kind "$1" \
        "${flags[@]}"
}

finish() {
    say "done in $((SECONDS - started_at_s)) s; the curves: tensorboard --logdir $out/tensorboard"
}
