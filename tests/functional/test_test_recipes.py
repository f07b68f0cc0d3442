"""A recipe of the reference runs as it stands, small."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from megatron.training.models.registry import model_kind
from tests.support import forked
from tests.support.runs import losses, run_gpt
from tools.dev import run_recipe
from tools.dev.lib.recipe_scale import scale_down

RECIPES = Path(__file__).parents[1] / "golden/recipes"


@pytest.mark.feature("Scripts: functional-test recipes of Megatron-LM, whole or scaled down")
def test_a_recipe_runs_and_its_second_run_repeats_the_first_from_the_middle(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(sys, "executable", forked.python())
    monkeypatch.setenv("PYTHON_EXEC", sys.executable)  # of torchrun's ranks
    recipe = RECIPES / "gpt_resume.yaml"
    code = run_recipe.main([str(recipe), "--scale-down", "--out", str(tmp_path / "out")])
    printed = capfd.readouterr().out
    assert code == 0, printed[-3000:]
    assert "5 iterations are equal in every digit: grad norm, lm loss" in printed
    assert sys.executable in printed


@pytest.mark.feature("ModelOpt: Megatron-LM's recipe of distillation runs and resumes")
def test_the_recipe_of_distillation_resumes_bitwise(tmp_path: Path) -> None:
    recipe = run_recipe.load(RECIPES / "gpt_modelopt_distill_resume.yaml")
    teacher = tmp_path / "teacher"
    small = scale_down(recipe.args, tmp_path) | {"--device": "cpu", "--num-workers": "0"}
    of_teacher = {k: v for k, v in small.items() if not k.startswith("--export")}
    words = run_recipe.words_of(of_teacher | {"--save": str(teacher), "--load": str(teacher)}, {})
    run_gpt(tmp_path, "--train-iters", "1", "--seed", "5", world_size=2, base=words)
    pairs = [["decoder.final_layernorm", "decoder.final_layernorm"]]
    distillation = {"intermediate_layer_pairs": pairs, "skip_lm_loss": True, "kd_loss_scale": 10.0}
    (teacher / "distill-config.yaml").write_text(json.dumps(distillation))
    small["--export-kd-teacher-load"] = str(teacher)
    small["--export-kd-cfg"] = str(teacher / "distill-config.yaml")
    words = run_recipe.words_of(small, {})
    first = run_gpt(tmp_path / "a", world_size=2, base=words)
    saved = Path(small["--save"])
    (saved / "latest_checkpointed_iteration.txt").write_text("5")
    shutil.rmtree(saved / "iter_0000010")
    again = run_gpt(tmp_path / "b", world_size=2, base=words)
    for name in ("lm loss", "logits distillation loss", "intermediate distillation loss"):
        assert losses(again, name) == losses(first, name)[5:]
    assert losses(first, "total loss")[-1] < losses(first, "total loss")[0]


@pytest.mark.feature("Vision: Megatron-LM's recipes of LLaVA and MiMo, scaled down")
@pytest.mark.parametrize(
    ("name", "kind", "ranks"),
    [
        pytest.param("multimodal_llava_tp1_pp1", "vlm", 1, marks=pytest.mark.slow),
        ("multimodal_llava_tp4_sp_cp2", "vlm", 4),
        ("mimo_dp8", "mimo", 2),
    ],
)
def test_recipes_of_models_that_read_images_run(tmp_path, monkeypatch, name, kind, ranks):
    recipe = run_recipe.load(RECIPES / f"{name}.yaml")
    for variable, value in recipe.env.items():
        monkeypatch.setenv(variable, value)
    assert recipe.script == model_kind(kind).entry_script
    small = scale_down(recipe.args, tmp_path) | {"--model-kind": kind}
    small |= {"--device": "cpu", "--num-workers": "0"}
    found = losses(run_gpt(tmp_path, base=run_recipe.words_of(small, {}), world_size=ranks))
    assert len(found) == 10
    assert all(0 < loss < 7 for loss in found)
