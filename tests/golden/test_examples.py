"""Every script in examples/: its command line, the config that it resolves to, its plan.

    python -m tests.golden.test_examples     writes examples.json anew: read the difference

`examples.json` has, for each script that trains, the world it starts and every value of its
resolved config that is not the default.  A script of examples/inference is read with the parser of
the tool that it starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from examples.inference.common import add_flags
from examples.inference.gpt.gpt_dynamic_inference import add_arrival_flags
from megatron.core.config.option import cli_default, options_of
from megatron.training.arguments.config_file import resolved_values
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.arguments.sections import SECTIONS
from megatron.training.config.run import RunConfig
from megatron.training.planning.check import check_only
from megatron.training.process.user_code import parse_tool_args
from tests.support.runs import ROOT, defaults_of
from tools import run_text_generation_server
from tools.checkpoint import convert as checkpoint_convert

GOLDEN = Path(__file__).parent / "examples.json"
# Whole ways from text to a trained model, and what they share: test_quickstart.py runs them.
WHOLE_WAYS = {"quickstart.sh", "common.sh"}
# Those of clusters start tools/launch.py: test_cluster_jobs.py.  Those of
# post_training run from text to a model: test_rl_example.py, test_post_training_examples.py,
# test_modelopt_examples.py.
ALL = sorted(
    str(path.relative_to(ROOT / "examples"))
    for path in ROOT.glob("examples/**/*.sh")
    if path.name not in WHOLE_WAYS and not {"clusters", "post_training"} & {*path.parts}
)
SCRIPTS = [script for script in ALL if not script.startswith("inference/")]

SLOW_TO_PLAN = {
    "deepseek_v3/train_deepseek_v3.sh",
    "gpt3/train_gpt3_345m_8gpu.sh",
    "gpt_oss/train_gpt_oss_20b.sh",  # sinks take attention apart into many blocks
    "llama/train_llama2_7b.sh",
    "llama/train_llama3_8b_h100.sh",
    "mamba/train.sh",
    "mimo/scripts/run_vlm_train.sh",
    "mixtral/train_mixtral_8x7b_distributed.sh",
}

# Entry of examples/inference -> the parser of its command line.
PARSERS: dict[str, Callable[[list[str]], Any]] = {
    **dict.fromkeys(
        ("tools/run_text_generation_server.py", "tools/run_mamba_text_generation_server.py"),
        lambda words: parse_args(run_text_generation_server.add_server_flags, argv=words),
    ),
    **dict.fromkeys(
        (
            "examples/inference/gpt/gpt_static_inference.py",
            "examples/inference/mamba/mamba_static_inference.py",
            "examples/inference/t5/simple_t5_batch_inference.py",
        ),
        lambda words: parse_args(add_flags, argv=words, args_defaults={"micro_batch_size": 1}),
    ),
    "examples/inference/gpt/gpt_dynamic_inference.py": lambda words: parse_args(
        add_arrival_flags, argv=words, args_defaults={"micro_batch_size": 1}
    ),
    "tools/checkpoint/convert.py": lambda words: checkpoint_convert.wanted_of(
        parse_tool_args(checkpoint_convert.get_parser, words)
    ),
}

# Stands in for torchrun and python: writes the words it was given, a line each.
RECORDER = '#!/bin/bash\nprintf "%s\\n" "$@" >"$RECORD"\n'


@dataclass(frozen=True)
class Launch:
    """What a script starts: so many processes of one program."""

    world_size: int
    entry: str
    words: tuple[str, ...]

    @classmethod
    def of(cls, script: str, *given: str, **environment: str) -> Launch:
        """By running it with the words ``given``."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for name_of_program in ("torchrun", "python"):
                (folder / name_of_program).write_text(RECORDER)
                (folder / name_of_program).chmod(0o755)
            path = f"{folder}{os.pathsep}{os.environ['PATH']}"
            environment |= {"PATH": path, "RECORD": str(folder / "words")}
            command = ["bash", str(ROOT / "examples" / script), *given]
            subprocess.run(command, check=True, env={**os.environ, **environment}, cwd=ROOT)
            words = (folder / "words").read_text().splitlines()
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        of_launcher = dict(zip(words[:at], words[1:at], strict=False))
        per_node, nodes = (of_launcher.get(f"--{n}", 1) for n in ("nproc_per_node", "nnodes"))
        world_size = int(per_node) * int(nodes)
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
        options = {f.name: opt for f, opt in options_of(SECTIONS[section])}
        for f in fields(SECTIONS[section]):
            # A flag that is not given has the command line's default, from which values follow.
            given = cli_default(f, options[f.name]) if f.name in options else None
            default = f.default if given is None else given
            default = list(default) if isinstance(default, tuple) else default
            if values[f.name] != default and not f.name.endswith("init_method"):
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


@pytest.mark.parametrize("script", ALL)
def test_flags_follow_the_paths_of_a_script_or_come_alone(script: str) -> None:
    plain = launch(script)
    assert Launch.of(script, "--check-only").words == (*plain.words, "--check-only")
    if "${GIVEN[0]:-" in (ROOT / "examples" / script).read_text():
        words = Launch.of(script, "my/folder", "--lr", "1").words
        assert words[-2:] == ("--lr", "1")
        assert "my/folder" in words
        assert len(words) == len(plain.words) + 2


@pytest.mark.feature("Examples: scripts that serve and generate, in Megatron-LM's spelling")
@pytest.mark.parametrize("script", [s for s in ALL if s not in SCRIPTS])
def test_a_script_of_inference_is_read_by_the_tool_that_it_starts(script: str) -> None:
    started = Launch.of(script, **dict.fromkeys(("TP_SIZE", "GPUS_PER_NODE"), "2"))
    assert (ROOT / started.entry).is_file()
    args = PARSERS[started.entry](list(started.words))
    if started.entry != "tools/checkpoint/convert.py":
        assert started.world_size == 2
        assert args.load.startswith("checkpoints/")
        assert args.tensor_model_parallel_size == (1 if "t5" in script else 2)
    if "server" in started.entry:
        assert run_text_generation_server.warnings_of(started.words) == []
        assert args.port == 5000


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({s: content(s) for s in SCRIPTS}, indent=1) + "\n")
    sys.exit()
