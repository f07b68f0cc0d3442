"""Compare megatron.core as a library with NVIDIA's release, on the same programs.

    python tools/dev/library_judge.py [--theirs FOLDER] [--cases NAME ...] [--record]

Runs `tests/support/megatron_core_cases` with NVIDIA's wheel from PyPI and with this checkout,
and compares the values that each case returns: losses, gradients by name, updated weights, keys and
shapes of checkpoints, ranks of groups.  Without ``--theirs`` it downloads the wheel.  Both run in
this Python, without Transformer Engine; without a GPU, torch.cuda is emulated.  ``--record`` writes
NVIDIA's values into `tests/golden/megatron_core_values.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tools.dev.lib.fingerprints import differences, fingerprint  # noqa: E402
from tools.dev.lib.timed_commands import run_to_file  # noqa: E402

CASES = ROOT / "tests/support/megatron_core_cases"
PROGRAM = ROOT / "tools/dev/lib/library_cases.py"
RECORD = ROOT / "tests/golden/megatron_core_values.json"
_LIMIT_S = 900.0  # of all cases with one library
RELEASE = "megatron-core==0.14.0"


def main() -> int:
    """Run both, print one line for each case, and return 1 if a value differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--theirs", type=Path, help="folder that contains NVIDIA's megatron/")
    parser.add_argument("--cases", nargs="*", default=[])
    parser.add_argument("--record", action="store_true", help="write NVIDIA's values for the tests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        theirs = options.theirs or _download(Path(folder))
        first = Path(folder, "first")  # on the path of either library, before it
        first.mkdir()
        first.joinpath("transformer_engine.py").write_text("raise ModuleNotFoundError\n")
        first.joinpath("cases").symlink_to(CASES)
        results = [
            _run([first, library], Path(folder, name), options.cases)
            for name, library in (("theirs", theirs), ("ours", ROOT))
        ]
    if options.record:
        _record(results[0])
    failed = 0
    for name, expected in results[0].items():
        raised = [v for v in (expected, results[1].get(name)) if isinstance(v, str)]
        for text in raised:
            print(text, file=sys.stderr)
        problems = [text.strip().splitlines()[-1] for text in raised]
        problems = problems or [*differences(expected, results[1].get(name))]
        failed += bool(problems)
        print(f"{name}: {'; '.join(problems[:5]) or f'{len(expected)} values equal'}")
    return 1 if failed else 0


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", RELEASE, "-d", folder]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "wheel")
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", folder / "wheel"]
    subprocess.run([*install, "einops"], check=True)  # HyperCommGrid needs it
    return folder / "wheel"


def _run(paths: list[Path], output: Path, cases: list[str]) -> dict[str, Any]:
    """Run the cases with ``paths`` as PYTHONPATH; return their values by case and rank."""
    output.mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    with (output / "log").open("w") as log:
        code = run_to_file([sys.executable, PROGRAM, output, *cases], log, _LIMIT_S, env=env)
    if code != 0:
        print((output / "log").read_text())
        raise subprocess.CalledProcessError(code or 1, PROGRAM)
    files = sorted(output.glob("*.pt"))
    return {n: v for f in files for n, v in torch.load(f, weights_only=True).items()}


def _record(values: dict[str, Any]) -> None:
    """Write the fingerprints of ``values``; cases that were not run keep theirs."""

    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known |= {name: fingerprint(value) for name, value in values.items()}
    rows = (f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
