#!/usr/bin/env bash
# Install the wheel with several versions of Python and torch; train, save, resume and generate.
#
#   bash tools/dev/matrix_of_versions.sh                        Python 3.10 to 3.13 x torch 2.11 to 2.13
#   bash tools/dev/matrix_of_versions.sh "3.10 3.13" "2.11.0"   some of them
#
# Prints a row for each pair.  FOLDER (default: build/versions) keeps environments and logs.  A Python
# is searched as pythonX.Y, then in ~/.pyenv/versions.  WHEELS=DIR has wheels to install; without it
# each Python builds its own.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
pythons=${1:-3.10 3.11 3.12 3.13}
torches=${2:-2.11.0 2.12.0 2.13.0}
folder=$(realpath -m "${FOLDER:-build/versions}")
mkdir -p "$folder"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

find_python() {
    local found
    found=$(command -v "python$1") && "$found" -c '' 2>/dev/null && echo "$found" && return
    compgen -G "$HOME/.pyenv/versions/$1.*/bin/python$1" | tail -1
}

# wheel PYTHON VERSION: prints the path of a wheel, which it builds once for each Python.
wheel() {
    local tag="cp${2/./}" found
    found=$(compgen -G "${WHEELS:-$folder/wheels}/megatron_train-*-$tag-$tag-*.whl" | tail -1)
    if [[ -z $found ]]; then
        "$1" -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" . >&2 || return 1
        found=$(compgen -G "$folder/wheels/megatron_train-*-$tag-$tag-*.whl" | tail -1)
    fi
    echo "$found"
}

model="--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 64 --micro-batch-size 2 --lr 1e-3 --mock-data --eval-iters 0
    --tokenizer-type NullTokenizer --vocab-size 100 --log-interval 1 --save ckpt --load ckpt"

# run NAME COMMAND: writes NAME.log and sets `result` to ok or FAILED.
run() {
    local name=$1
    if "${@:2}" >"$name.log" 2>&1; then result=ok; else result=FAILED; fi
}

is_fine=0
echo "| Python | torch | install | compiled | train and save | resume | generate |"
echo "|---|---|---|---|---|---|---|"
for version in $pythons; do
    base=$(find_python "$version")
    for torch in $torches; do
        place=$folder/$version-$torch
        rm -rf "$place/ckpt" && mkdir -p "$place"
        cells=()
        if [[ -z $base ]]; then
            echo "| $version | $torch | no python$version | | | | |"
            is_fine=1
            continue
        fi
        [[ -x $place/venv/bin/python ]] || "$base" -m venv "$place/venv"
        bin=$place/venv/bin
        file=$(wheel "$base" "$version")
        pushd "$place" >/dev/null || exit 1
        run install "$bin/pip" install --no-compile "torch==$torch" "$file"
        cells+=("$result")
        run compiled "$bin/python" -c "import megatron.core.datasets.helpers_cpp, megatron.core.kernels_cpp"
        cells+=("$result")
        # shellcheck disable=SC2086  # words
        run train "$bin/megatron-train" gpt $model --train-iters 4 --exit-interval 2
        cells+=("$result")
        # shellcheck disable=SC2086
        run resume "$bin/megatron-train" gpt $model --train-iters 4
        grep -q "iteration  *3/  *4" resume.log && ! grep -q "iteration  *1/  *4" resume.log ||
            result=FAILED
        cells+=("$result")
        run generate "$bin/megatron-generate" --load ckpt --num-tokens 4 --prompt "1 2 3"
        cells+=("$result")
        popd >/dev/null || exit 1
        echo "| $version | $torch | $(printf '%s | ' "${cells[@]}")" | sed 's/ $//'
        [[ ${cells[*]} == *FAILED* ]] && is_fine=1
    done
done
exit $is_fine
