"""Objectives of post-training are registered by the programs that build their models."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.models import registry
from tests.repo.source import ROOT
from tests.support import selection
from tests.support.command_lines import run_of


@pytest.mark.parametrize(
    "program",
    selection.first(
        2, ["pretrain_rl", "tools.checkpoint.convert", "pretrain_gpt", "pretrain_mamba"]
    ),
)
def test_a_program_registers_the_objectives(program):
    code = (
        f"import {program}\n"
        "from megatron.training.models.registry import _OBJECTIVES\n"
        "assert set(_OBJECTIVES) == {'sft', 'dpo', 'reward', 'grpo', 'teacher', 'store', 'save',"
        " 'eval_generate'}"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_program_without_the_objective_is_told_what_to_import(monkeypatch):
    monkeypatch.setattr(registry, "_OBJECTIVES", {})
    with pytest.raises(ConfigError, match="add `import megatron.post_training` to it"):
        registry.implementation_of(run_of("--sft"))
