"""Recipes: the texts in the YAML, the command line made of it, and its small form."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.training.arguments.parser import build_parser, parse_args
from megatron.training.arguments.resolve import resolve
from tests.support.runs import defaults_of
from tools.dev import run_recipe
from tools.dev.lib import recipe_file, recipe_results
from tools.dev.lib.recipe_scale import DATA_FLAGS, scale_down, smallest_world

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


LIST_OF_CASES = """
spec:
  name: "{{test_case}}"
  model: {}
  script: |-
    ARGUMENTS=(
      "TRAINING_SCRIPT_PATH={}"
      "TRAINING_PARAMS_PATH=./tests/functional_tests/test_cases/x/y/model_config.yaml"
    )
products:
  - test_case: [a_case]
"""


def test_scalars_stay_the_text_that_was_written(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(EVERY_SYNTAX)
    assert recipe_file.read_recipe(path) == {
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
        recipe_file.read_recipe(path)


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
    path = tmp_path / "nemo" / "model_config.yaml"
    path.parent.mkdir()
    path.write_text("MODEL_ARGS:\n  --lr: 1\nENV_VARS:\n  A: 1\n")
    with pytest.raises(ConfigError, match=r"it needs train_nemo.py \(NeMo, a program of its own\)"):
        run_recipe.load(path, "train_nemo.py")


def test_a_list_of_items_is_no_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("- a\n- b\n")
    with pytest.raises(DataError, match="this is no mapping"):
        recipe_file.read_recipe(path)


def test_the_script_is_told_from_the_folders():
    cases = Path("/x/test_cases")
    assert recipe_file.script_of(cases / "bert/b_mr_tp2/a.yaml", {}) == "pretrain_bert.py"
    assert recipe_file.script_of(cases / "mixtral/a/a.yaml", {}) == "pretrain_gpt.py"


@pytest.mark.parametrize(
    "content",
    [
        {"TRAINING_SCRIPT_PATH": "pretrain_t5.py"},
        {"ENV_VARS": {"TRAINING_SCRIPT_PATH": "pretrain_t5.py"}},
        {"script": "ls\nARGUMENTS=(\n  'TRAINING_SCRIPT_PATH=pretrain_t5.py'\n)"},
        {"spec": {"script": 'X=1\nTRAINING_SCRIPT_PATH="pretrain_t5.py" bash run.sh'}},
        {"script": "pretrain_t5.py"},
    ],
)
def test_the_script_is_taken_from_the_recipe(content):
    assert recipe_file.script_of(Path("/x/bert/a/model_config.yaml"), content) == "pretrain_t5.py"


def test_the_script_is_taken_from_the_list_that_names_the_test_case(tmp_path):
    case = tmp_path / "tests/functional_tests/test_cases/hybrid/a_case/model_config.yaml"
    lists = tmp_path / "tests/test_utils/recipes"
    lists.mkdir(parents=True)
    case.parent.mkdir(parents=True)
    (lists / "other.yaml").write_text(LIST_OF_CASES.format("gpt", "pretrain_gpt.py"))
    (lists / "hybrid.yaml").write_text(LIST_OF_CASES.format("hybrid", "pretrain_t5.py"))
    assert recipe_file.script_of(case, {}) == "pretrain_t5.py"


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
    instances = {"--num-distributed-optimizer-instances": "2"}
    assert smallest_world(instances) == 2
    assert smallest_world({**instances, "--context-parallel-size": "2"}) == 4
    assert smallest_world({**instances, "--expert-model-parallel-size": "4"}) == 8


def test_one_rank_needs_no_launcher_and_more_are_spread_over_nodes():
    assert "torch.distributed.run" not in run_recipe.launcher("pretrain_gpt.py", 1)
    many = run_recipe.launcher("pretrain_gpt.py", 16, nproc_per_node=8)
    assert many[many.index("--nproc-per-node") + 1] == "8"
    assert many[many.index("--nnodes") + 1] == "2"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_small_form_keeps_every_flag_but_the_data_and_parses(path, tmp_path):
    recipe = run_recipe.load(path)
    small = scale_down(recipe.args, tmp_path)
    dropped = set(recipe.args) - set(small)
    assert dropped <= {*DATA_FLAGS, "--distributed-backend", "--dataloader-type"}
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


def test_lists_in_brackets_are_words_and_expressions_are_not():
    args = {
        "--rampup-batch-size": "[384 384 97656250]",
        "--recompute-modules": ["core_attn mlp"],
        "--spec": "[local]",
        "--cp-comm-type": ["a2a", "p2p"],
        "--moe-layer-freq": "[0, 1]",
        "--no-rope-freq": "[0]*2+[1]",
        "--window-attn-skip-freq": "[1]",
        "--pipeline-model-parallel-layout": r"Et\|tL",
    }
    assert run_recipe.words_of(args, {}) == [
        *("--rampup-batch-size", "384", "384", "97656250"),
        *("--recompute-modules", "core_attn", "mlp"),
        *("--spec", "local"),
        *("--cp-comm-type", "a2a", "p2p"),
        *("--moe-layer-freq", "[0, 1]"),
        *("--no-rope-freq", "[0]*2+[1]"),
        *("--window-attn-skip-freq", "[1]"),
        *("--pipeline-model-parallel-layout", r"Et\|tL"),
    ]


def test_merge_keys_are_merged(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("MODEL_ARGS: &a\n  --x: 1\n  --y: 2\nMODEL_ARGS_2:\n  <<: *a\n  --y: 3\n")
    assert recipe_file.read_recipe(path)["MODEL_ARGS_2"] == {"--x": "1", "--y": "3"}


# An entry script: one step more at each start, until four are done; the loss is the step.
TRAINING = """
import json, os, sys
words = sys.argv[1:]
value = lambda flag: words[words.index(flag) + 1]
save = value("--save")
os.makedirs(save, exist_ok=True)
tracker = os.path.join(save, "latest_checkpointed_iteration.txt")
first = int(open(tracker).read()) if "--load" in words and os.path.exists(tracker) else 0
last = min(4, first + int(value("--steps")))
print("starts", " ".join(words))
with open(value("--metrics-file"), "a") as file:
    for step in range(first + 1, last + 1):
        print(f" [x] iteration {step}/ 4 | lm loss: {step}.0 |")
        file.write(json.dumps({"kind": "step", "iteration": step, "lm loss": float(step)}) + "\\n")
open(tracker, "w").write(str(last))
"""
RECIPE = """
TEST_TYPE: {test_type}
BEFORE_SCRIPT: echo before $OUTPUT_PATH
AFTER_SCRIPT: |
  echo after
  exit {after}
MODEL_ARGS:
  --train-iters: 4
  --steps: {steps}
  --save: ${{CHECKPOINT_SAVE_PATH}}
  --load: ${{CHECKPOINT_LOAD_PATH}}
  --save-interval: 2
METRICS: [lm loss, iteration-time]
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes a recipe for `TRAINING` and runs it; the exit code."""
    for name in ("CHECKPOINT_SAVE_PATH", "CHECKPOINT_LOAD_PATH", "OUTPUT_PATH"):
        monkeypatch.delenv(name, raising=False)

    def run(test_type, *words, steps=4, after=0, more=""):
        (tmp_path / "train.py").write_text(TRAINING)
        path = tmp_path / "model_config.yaml"
        path.write_text(RECIPE.format(test_type=test_type, steps=steps, after=after) + more)
        script = ["--script", str(tmp_path / "train.py"), "--out", str(tmp_path / "out")]
        return run_recipe.main([str(path), *script, *words])

    return run


def golden(folder, *values):
    entry = {"start_step": 1, "end_step": len(values), "step_interval": 1}
    entry["values"] = {str(i + 1): value for i, value in enumerate(values)}
    (folder / "golden_values_dev_dgx_h100.json").write_text(json.dumps({"lm loss": entry}))


@pytest.mark.parametrize("test_type", ["regular", "frozen-start"])
def test_a_run_is_compared_with_the_golden_values_beside_it(recipe, tmp_path, capfd, test_type):
    golden(tmp_path, 1.01, 2, "nan", 4)
    assert recipe(test_type) == 0
    printed = capfd.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[4:]][:2] == ["before", "starts"]
    assert "after" in printed.split("starts")[1]
    assert "lm loss, iteration-time: as in" in printed
    golden(tmp_path, 1, 3)
    assert recipe(test_type) == 1
    assert "lm loss at step 2 is 2, and 3 is wanted: more than 5% apart" in capfd.readouterr().err
    assert recipe(test_type, more="SKIP_PYTEST: 1\n") == 0


def test_a_shell_text_that_fails_ends_the_recipe(recipe):
    assert recipe("regular", after=3) == 3


def test_a_resumed_run_repeats_the_losses_in_every_digit(recipe, capfd):
    assert recipe("ckpt-resume") == 0
    assert "2 iterations are equal in every digit: lm loss" in capfd.readouterr().out


def test_a_resumed_run_may_have_flags_of_its_own(recipe, capfd):
    more = (
        "MODEL_ARGS_2:\n  --steps: 4\n  --second: true\n  --save: ${CHECKPOINT_SAVE_PATH}\n"
        "  --load: ${CHECKPOINT_LOAD_PATH}\n"
    )
    assert recipe("ckpt-resume", more=more) == 0
    printed = capfd.readouterr().out
    starts = [line for line in printed.splitlines() if line.startswith("starts")]
    assert ["--second" in line for line in starts] == [False, True]
    assert "lm loss, iteration-time: as in" in printed


def test_a_frozen_resume_needs_the_checkpoint_of_an_earlier_run(
    recipe, tmp_path, capfd, monkeypatch
):
    assert recipe("frozen-resume") == 2
    assert "CHECKPOINT_LOAD_PATH" in capfd.readouterr().err
    monkeypatch.setenv("CHECKPOINT_LOAD_PATH", str(tmp_path / "frozen"))
    assert recipe("frozen-resume") == 2
    assert "let CHECKPOINT_LOAD_PATH name the folder" in capfd.readouterr().err
    (tmp_path / "frozen").mkdir()
    (tmp_path / "frozen" / run_recipe.TRACKER).write_text("2")
    golden(tmp_path, 1, 2, 3, 4)
    assert recipe("frozen-resume") == 0
    assert "as in" in capfd.readouterr().out


def test_a_release_is_started_again_until_all_steps_are_done(recipe, capfd):
    assert recipe("release", steps=2) == 0
    assert capfd.readouterr().out.count("\nstarts") == 2


def test_repeated_runs_start_from_nothing(recipe, capfd):
    assert recipe("regular", more="N_REPEAT: 3\n") == 0
    printed = capfd.readouterr().out
    assert printed.count("\nstarts") == 3
    assert printed.count("iteration 1/") == 3


def test_a_dry_run_prints_the_shell_texts_and_runs_nothing(recipe, tmp_path, capfd):
    assert recipe("regular", "--dry-run") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "echo before $OUTPUT_PATH"
    assert lines[-2:] == ["echo after", "exit 0"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"1": "x"}, "no golden values: could not convert string to float: 'x'"),
        (None, "no golden values"),
    ],
)
def test_golden_values_that_cannot_be_read_are_named(tmp_path, values, problem):
    (tmp_path / "golden_values_a.json").write_text(json.dumps({"lm loss": {"values": values}}))
    with pytest.raises(DataError, match=re.escape(problem)):
        recipe_results.read_golden(tmp_path / "golden_values_a.json")


def test_golden_values_may_be_a_list_and_missing_metrics_are_named():
    entry = {"start_step": 0, "step_interval": 5, "values": [1.0, 2.0]}
    assert dict(recipe_results._steps(entry)) == {0: 1.0, 5: 2.0}
    names = ["lm loss", "num-zeros", "mem-allocated-bytes"]
    run = {"lm loss": {5: 2.05}}
    assert list(recipe_results.differences({"lm loss": {5: 2.0}, "num-zeros": {}}, run, names)) == [
        "num-zeros is not in the run"
    ]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_resolves_as_it_is_written(path, tmp_path):
    recipe = recipe_file.load(path)
    for args in filter(None, (recipe.args, recipe.args_2)):
        names = re.findall(r"\$\{?(\w+)", str(args))
        words = run_recipe.words_of(args, {name: "x" for name in names})
        options = parse_args(argv=words, args_defaults=defaults_of(recipe.script))
        resolve(options, smallest_world(args))
