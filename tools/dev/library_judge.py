"""Compare megatron.core as a library with NVIDIA's release, on the same programs.

    python tools/dev/library_judge.py [--theirs FOLDER] [--cases NAME ...] [--record]

Runs `tests/support/megatron_core_cases.py` with NVIDIA's wheel from PyPI and with this checkout,
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
from tools.dev.lib.fingerprints import fingerprint  # noqa: E402

CASES = ROOT / "tests/support/megatron_core_cases.py"
RECORD = ROOT / "tests/golden/megatron_core_values.json"
RELEASE = "megatron-core==0.14.0"
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}  # fp32, other orders of additions


def main() -> int:
    """Run both, print one line for each case, and return 1 if a value differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--theirs", type=Path, help="folder that contains NVIDIA's megatron/")
    parser.add_argument("--cases", nargs="*", default=[])
    parser.add_argument("--record", action="store_true", help="write NVIDIA's values for the tests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        theirs = options.theirs or _download(Path(folder))
        blocked = Path(folder, "blocked")
        blocked.mkdir()
        blocked.joinpath("transformer_engine.py").write_text("raise ModuleNotFoundError\n")
        results = [
            _run([blocked, library], Path(folder, name), options.cases)
            for name, library in (("theirs", theirs), ("ours", ROOT))
        ]
    if options.record:
        _record(results[0])
    failed = 0
    for name, expected in results[0].items():
        problems = [*_differences(expected, results[1].get(name))]
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
    subprocess.run(
        [sys.executable, CASES, output, *cases], env=env, check=True, stderr=subprocess.DEVNULL
    )
    files = sorted(output.glob("*.pt"))
    return {n: v for f in files for n, v in torch.load(f, weights_only=True).items()}


def _record(values: dict[str, Any]) -> None:
    """Write the fingerprints of ``values``; cases that were not run keep theirs."""

    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known |= {name: fingerprint(value) for name, value in values.items()}
    rows = (f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def _differences(expected: Any, found: Any, place: str = "") -> Any:
    """Yield a sentence for each value that differs."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if "error" in expected or "error" in found:
            yield from (
                v["error"].strip().splitlines()[-1] for v in (expected, found) if "error" in v
            )
            return
        for key in expected.keys() | found.keys():
            if key in expected and key in found:
                yield from _differences(expected[key], found[key], key)
            else:
                yield f"{key} is only {'theirs' if key in expected else 'ours'}"
    elif torch.is_tensor(expected) and torch.is_tensor(found):
        try:
            torch.testing.assert_close(found.detach(), expected.detach(), **TOLERANCE)
        except AssertionError as error:
            shapes = f"{tuple(found.shape)} {tuple(expected.shape)}"
            yield f"{place}: {str(error).splitlines()[0]} {shapes}"
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if len(expected) != len(found):
            yield f"{place}: {len(found)} entries, not {len(expected)}"
        for one, other in zip(expected, found, strict=False):
            yield from _differences(one, other, place)
    elif isinstance(expected, float) and isinstance(found, float):
        if abs(expected - found) > 2e-5 * max(1, abs(expected)):
            yield f"{place}: {found}, not {expected}"
    elif expected != found:
        yield f"{place}: {found}, not {expected}"


if __name__ == "__main__":
    sys.exit(main())
