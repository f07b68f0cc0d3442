#!/usr/bin/env bash
# Prepare the project's own Python environment in .venv, once, and print the path of its python.
#
#   PYTHON=/path/to/python   use that one instead, as it is
#   TORCH=torch==2.12.0      another torch than the tested one
#   EXTRAS=hf,serve          extras of pyproject.toml; else dev, the tools of the developers
# Without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves 3 GB of download.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -n "${PYTHON:-}" ]]; then
    echo "$PYTHON"
    exit
fi

torch="${TORCH:-torch==2.13.0}"
extras="${EXTRAS:-dev}"
stamp=.venv/ready-$extras
inputs=(pyproject.toml setup.py megatron/core/datasets/helpers.cpp megatron/core/fusions/cpu/*.{cpp,h}
    tools/env.sh)
state="$torch $(cat "${inputs[@]}" | cksum)"
is_ready() { [[ -f $1 && "$(cat "$1")" == "$state" ]]; }
if ! is_ready "$stamp" && ! is_ready .venv/ready-dev; then
    for python in python3 python3.13 python3.12 python3.11 python3.10 none; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            break
        fi
    done
    if [[ $python == none ]]; then
        echo "tools/env.sh: Python 3.10 or newer is needed and was not found" >&2
        exit 1
    fi
    echo "preparing .venv with $("$python" --version), $torch and [$extras]" >&2
    {
        [[ -x .venv/bin/python ]] || "$python" -m venv .venv || { rm -rf .venv && exit 1; }
        # Most modules are never imported; the others are compiled when they are.
        pip=(.venv/bin/python -m pip install --quiet --no-compile)
        "${pip[@]}" --no-deps --editable . &  # compiles the extensions in the meantime
        extensions=$!
        needs=$(.venv/bin/python - "$extras" <<'EOF'
import sys

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
for extra in sys.argv[1].split(","):
    project["dependencies"] += project["optional-dependencies"][extra]
print("\n".join(project["dependencies"]))
EOF
        )
        "${pip[@]}" "$torch" --requirement <(echo "$needs") || { kill "$extensions"; exit 1; }
        wait "$extensions"
    } >&2
    echo "$state" >"$stamp"
fi
echo "$PWD/.venv/bin/python"
