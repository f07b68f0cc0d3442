"""Every script in examples/: its command line, the config that it resolves to, its plan.

    python -m tests.golden.test_examples     writes examples.json anew: read the difference

`examples.json` has, for each script, the world it starts and every value of its resolved config
that is not the default.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.training.arguments.config_file import resolved_values
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.arguments.sections import SECTIONS
from megatron.training.config.run import RunConfig
from megatron.training.plan.check import check_only
from tests.functional.runs import ROOT, defaults_of

GOLDEN = Path(__file__).parent / "examples.json"
# Whole ways from text to a trained model, and what they share: test_quickstart.py runs them.
WHOLE_WAYS = {"quickstart.sh", "common.sh"}
SCRIPTS = sorted(
    str(path.relative_to(ROOT / "examples"))
    for path in ROOT.glob("examples/**/*.sh")
    if path.name not in WHOLE_WAYS
)

SLOW_TO_PLAN = {"gpt_oss/train_gpt_oss_20b.sh"}  # sinks take attention apart into many blocks

# Stands in for torchrun: writes the words it was given, a line each.
RECORDER = '#!/bin/bash\nprintf "%s\\n" "$@" >"$RECORD"\n'


@dataclass(frozen=True)
class Launch:
    """What a script starts: so many processes of one program."""

    world_size: int
    entry: str
    words: tuple[str, ...]

    @classmethod
    def of(cls, script: str, **environment: str) -> Launch:
        """By running it."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "torchrun").write_text(RECORDER)
            (folder / "torchrun").chmod(0o755)
            path = f"{folder}{os.pathsep}{os.environ['PATH']}"
            environment |= {"PATH": path, "RECORD": str(folder / "words")}
            command = ["bash", str(ROOT / "examples" / script)]
            subprocess.run(command, check=True, env={**os.environ, **environment}, cwd=ROOT)
            words = (folder / "words").read_text().splitlines()
        at = next(i for i, word in enumerate(words) if word.startswith("pretrain_"))
        of_launcher = dict(zip(words[:at], words[1:at], strict=False))
        world_size = int(of_launcher["--nproc_per_node"]) * int(of_launcher.get("--nnodes", 1))
        return cls(world_size, words[at], tuple(words[at + 1 :]))

    def parse(self) -> Any:
        """As the program does; raises ConfigError for what the parser does not take."""
        return parse_args(argv=list(self.words), args_defaults=defaults_of(self.entry))

    def resolve(self) -> RunConfig:
        """The run on its own world."""
        return resolve(self.parse(), self.world_size)


launch = cache(Launch.of)


def content(script: str) -> dict[str, Any]:
    """The script's part of the golden file."""
    started = launch(script)
    found: dict[str, Any] = {"entry": started.entry, "world_size": started.world_size}
    for section, values in resolved_values(started.resolve()).items():
        for f in fields(SECTIONS[section]):
            default = list(f.default) if isinstance(f.default, tuple) else f.default
            if values[f.name] != default:
                found[f"{section}.{f.name}"] = values[f.name]
    return found


@pytest.mark.feature("Examples: launch scripts of known models, in Megatron-LM's spelling")
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_resolves_to_its_config(script: str) -> None:
    assert content(script) == json.loads(GOLDEN.read_text())[script]


def test_every_script_has_its_config_and_no_other_has() -> None:
    assert list(json.loads(GOLDEN.read_text())) == SCRIPTS


@pytest.mark.parametrize(
    "script",
    [pytest.param(s, marks=[pytest.mark.slow] * (s in SLOW_TO_PLAN)) for s in SCRIPTS],
)
def test_the_script_has_a_plan_at_its_world_size(script: str) -> None:
    args, said = launch(script).parse(), []
    args.check_world_size = launch(script).world_size
    assert check_only(args, said.append) == 0, "\n".join(said)


def test_the_fp8_form_of_llama3_parses() -> None:
    parsed = Launch.of("llama/train_llama3_8b_h100.sh", FP8="1", TP_SIZE="2").parse()
    assert parsed.fp8 == "hybrid"
    assert parsed.sequence_parallel


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({s: content(s) for s in SCRIPTS}, indent=1) + "\n")
    sys.exit()
