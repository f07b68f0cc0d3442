"""Recipes: the texts in the YAML, the command line made of it, and its small form."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.training.arguments.parser import build_parser
from tools import run_recipe
from tools.recipe_scale import scale_down, smallest_world

RECIPES = sorted((Path(__file__).parents[2] / "golden/recipes").glob("*.yaml"))
RESUME = next(path for path in RECIPES if path.name == "gpt_resume.yaml")

EVERY_SYNTAX = """
# comment
ENV_VARS:
  ONE: 1
  EMPTY:
MODEL_ARGS:
  --text: 'a # b'   # comment
  --url: https://host:80/x
  --frequency: ([0]*3+[1]*2)
  "--quoted key": "a: b"
METRICS:
- first
- "second one"
FLOW: [a, 'b, c', 3]
SCRIPT: |
  echo a
  echo b
LAST: end
"""


def test_scalars_stay_the_text_that_was_written(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(EVERY_SYNTAX)
    assert run_recipe.read_recipe(path) == {
        "ENV_VARS": {"ONE": "1", "EMPTY": ""},
        "MODEL_ARGS": {
            "--text": "a # b",
            "--url": "https://host:80/x",
            "--frequency": "([0]*3+[1]*2)",
            "--quoted key": "a: b",
        },
        "METRICS": ["first", "second one"],
        "FLOW": ["a", "b, c", "3"],
        "SCRIPT": "echo a\necho b\n",
        "LAST": "end",
    }


def test_what_is_no_yaml_is_named_with_its_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("a:\n\tb: c")
    with pytest.raises(DataError, match=r"recipe.yaml: .*line 2"):
        run_recipe.read_recipe(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ENV_VARS:\n  A: 1\n", "no MODEL_ARGS, so there is nothing to run"),
        ("MODEL_ARGS:\n  lr: 1\n", "MODEL_ARGS lr is no flag"),
        ("MODEL_ARGS:\n  --lr: 1\nTEST_TYPE: odd\n", "TEST_TYPE odd is not one of regular, ckpt"),
    ],
)
def test_a_recipe_that_cannot_run_says_why(tmp_path, text, reason):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        run_recipe.load(path)


def test_a_recipe_for_a_script_that_is_missing_says_so(tmp_path):
    path = tmp_path / "multimodal" / "model_config.yaml"
    path.parent.mkdir()
    path.write_text("MODEL_ARGS:\n  --lr: 1\n")
    with pytest.raises(ConfigError, match=r"it wants pretrain_vlm.py, which is not here"):
        run_recipe.load(path)


def test_a_list_of_items_is_no_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("- a\n- b\n")
    with pytest.raises(DataError, match="this is no mapping"):
        run_recipe.read_recipe(path)


def test_the_script_is_told_from_the_folders():
    assert run_recipe.script_of(Path("/x/test_cases/bert/b_mr_tp2/model_config.yaml")) == (
        "pretrain_bert.py"
    )
    assert run_recipe.script_of(Path("/x/test_cases/mixtral/a/model_config.yaml")) == (
        "pretrain_gpt.py"
    )


def test_true_is_a_bare_flag_false_is_left_out_and_references_are_filled_in(monkeypatch):
    monkeypatch.setenv("WHERE", "/data")
    args = {"--bf16": "true", "--swiglu": "false", "--data-path": "0.5 ${WHERE}/a 0.5 $HERE/b"}
    words = run_recipe.words_of(args, {"HERE": "/here"})
    assert words == ["--bf16", "--data-path", "0.5", "/data/a", "0.5", "/here/b"]


def test_every_reference_that_is_unset_is_named_at_once():
    args = {"--save": "${NO_SUCH_A}", "--load": "$NO_SUCH_B"}
    with pytest.raises(ConfigError, match="refers to NO_SUCH_A, NO_SUCH_B, unset here"):
        run_recipe.words_of(args, {})


def test_a_frequency_in_brackets_stays_one_word():
    assert run_recipe.words_of({"--moe-layer-freq": "([0] + [1] * 3)"}, {}) == [
        "--moe-layer-freq",
        "([0] + [1] * 3)",
    ]


def test_the_world_is_as_small_as_the_degrees_allow():
    def world(**degrees):
        args = {f"--{k.replace('_', '-')}-parallel-size": str(v) for k, v in degrees.items()}
        return smallest_world(args)

    assert world() == 1
    assert world(tensor_model=2, pipeline_model=4) == 8
    assert world(expert_model=4, context=2) == 4
    assert world(expert_model=4, tensor_model=2) == 8
    assert world(expert_model=4, tensor_model=2, expert_tensor=1) == 4


def test_one_rank_needs_no_launcher_and_more_are_spread_over_nodes():
    recipe = run_recipe.Recipe({"--lr": "1"})
    assert "torch.distributed.run" not in run_recipe.command(recipe, 1)
    many = run_recipe.command(recipe, 16, nproc_per_node=8)
    assert many[many.index("--nproc-per-node") + 1] == "8"
    assert many[many.index("--nnodes") + 1] == "2"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_small_form_keeps_every_flag_but_the_data_and_parses(path, tmp_path):
    recipe = run_recipe.load(path)
    small = scale_down(recipe.args, tmp_path)
    dropped = set(recipe.args) - set(small)
    assert dropped <= {"--data-path", "--vocab-file", "--merge-file", "--tokenizer-model"}
    parsed = build_parser().parse_args(run_recipe.words_of(small, recipe.env))
    assert parsed.train_iters == 10 or parsed.train_samples == 10 * parsed.global_batch_size
    assert parsed.hidden_size <= 64
    assert parsed.mock_data


def test_a_run_measured_in_samples_shrinks_in_samples(tmp_path):
    args = {"--train-samples": "1000", "--lr-decay-samples": "800", "--micro-batch-size": "1"}
    small = scale_down({**args, "--global-batch-size": "100"}, tmp_path)
    assert small["--global-batch-size"] == "2"
    assert small["--train-samples"] == "20"
    assert small["--lr-decay-samples"] == "16"


def test_a_list_for_each_layer_shrinks_with_the_layers(tmp_path):
    args = {"--num-layers": "24", "--moe-layer-freq": "([0]*3 + [1]*20 + [0])"}
    assert scale_down(args, tmp_path)["--moe-layer-freq"] == "([0,0])"
    stages = {"--pipeline-model-parallel-size": "4"}
    args = {"--num-layers": "24", "--moe-layer-freq": "([0]*1+[1]*23)", **stages}
    assert scale_down(args, tmp_path)["--moe-layer-freq"] == "([0,1])"
    assert scale_down({"--moe-layer-freq": "2"}, tmp_path)["--moe-layer-freq"] == "2"


def test_a_ramp_ends_inside_the_small_run(tmp_path):
    args = {"--rampup-batch-size": "32 32 65324160", "--global-batch-size": "256"}
    small = scale_down({**args, "--train-samples": "268554688"}, tmp_path)
    start, step, samples = map(int, small["--rampup-batch-size"])
    ahead = int(small["--global-batch-size"]) - start
    assert ahead > 0
    assert ahead % step == 0
    assert samples < int(small["--train-samples"])


def test_virtual_stages_each_keep_a_layer(tmp_path):
    args = {
        "--num-layers": "24",
        "--pipeline-model-parallel-size": "4",
        "--num-layers-per-virtual-pipeline-stage": "3",
    }
    small = scale_down(args, tmp_path)
    assert small["--pipeline-model-parallel-size"] == "2"
    assert small["--num-layers"] == "4"
    assert small["--num-layers-per-virtual-pipeline-stage"] == "1"


def test_dry_run_prints_the_command_and_runs_nothing(capsys, tmp_path):
    out = tmp_path / "out"
    words = [str(RESUME), "--scale-down", "--dry-run", "--out", str(out)]
    assert run_recipe.main(words) == 0
    printed = capsys.readouterr().out
    assert "NCCL_ALGO=Ring" in printed
    assert "--hidden-size 64" in printed
    assert not out.exists()


def test_an_unset_reference_ends_with_a_sentence(capsys):
    assert run_recipe.main([str(RESUME), "--dry-run"]) == 2
    assert "CHECKPOINT_PATH" in capsys.readouterr().err
