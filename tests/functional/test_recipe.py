"""A recipe of the reference runs as it stands, small."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import run_recipe

RECIPES = Path(__file__).parents[1] / "golden/recipes"


@pytest.mark.feature("Scripts: functional-test recipes of Megatron-LM, whole or scaled down")
def test_a_recipe_runs_and_its_second_run_repeats_the_first_from_the_middle(tmp_path, capfd):
    recipe = RECIPES / "gpt_resume.yaml"
    code = run_recipe.main([str(recipe), "--scale-down", "--out", str(tmp_path / "out")])
    printed = capfd.readouterr().out
    assert code == 0, printed[-3000:]
    assert "5 iterations are equal in every digit: grad norm, lm loss" in printed
    assert sys.executable in printed
