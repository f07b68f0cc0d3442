"""--config: file first, command line on top; what is written starts the same run again."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path

import pytest

from megatron.core import optional
from megatron.core.config.errors import ConfigError, MissingDependency
from megatron.training.arguments.config_file import read_config_file, write_config
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.programs import PROGRAMS, name_in
from megatron.training.arguments.resolve import resolve
from tests.support.command_lines import argv, run_of

# Every kind of value: switches both ways, lists, pairs, patterns, enums, floats, words.
WORDS = (
    "--bf16 --swiglu --no-manual-gc-eval --window-size 8,0 --window-attn-skip-freq [1,0]*2 "
    "--attention-backend fused --profile-ranks 0 --split 8,1,1 --adam-eps 1e-9 --no-save-rng "
    "--clip-grad inf --no-progress-bar --disable-bias-linear --recompute-activations "
    "--rampup-batch-size 2 2 16 --global-batch-size 4 --train-samples 100 --no-load-rng"
)


def run_from_file(path: Path, *words: str, world_size: int = 1, provider: object = None):  # noqa: ANN201
    args = parse_args(provider, argv=["--yaml-cfg", str(path), *words])  # type: ignore[arg-type]
    return resolve(args, world_size)


@pytest.mark.feature("Command line: config.yaml beside a checkpoint starts the identical run")
def test_what_is_written_gives_the_identical_run(tmp_path: Path) -> None:
    for words, without in ((WORDS, ("--train-iters",)), ("", ())):
        run = run_of(words, without=without)
        write_config(run, tmp_path / "config.yaml")
        assert run_from_file(tmp_path / "config.yaml") == run


def test_a_recipe_is_named_without_its_path() -> None:
    assert read_config_file("sft-lora", "--config")["train"] == "sft"
    with pytest.raises(ConfigError, match="--config sft-lra: no such file; .* or a recipe's name"):
        read_config_file("sft-lra", "--config")


def test_what_is_written_is_json_and_shows_what_it_resolved_to(tmp_path: Path) -> None:
    write_config(run_of("--swiglu", world_size=2), tmp_path / "config.yaml")
    content = json.loads((tmp_path / "config.yaml").read_text())
    assert content["num_layers"] == 4
    assert content["global_batch_size"] is None
    assert content["_resolved"]["training"]["global_batch_size"] == 4
    assert content["_resolved"]["model"]["activation_func"] == "silu"
    assert content["_world_size"] == 2
    assert content["train"] == name_in((tmp_path / "config.yaml").read_text()) == "gpt"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--sft", "sft"),
        ("--dpo-beta 0.3", "dpo"),
        ("--reward-model", "reward"),
        ("--model-kind mamba --mamba-num-groups 1", "mamba"),
    ],
)
def test_what_is_written_names_its_program(tmp_path: Path, words: str, name: str) -> None:
    chats = "--data-path chats.jsonl --split 95,5,0 --tokenizer-type HuggingFaceTokenizer "
    chats += "--tokenizer-model tiny"
    is_mock = name == "mamba"
    without = () if is_mock else ("--mock-data", "--tokenizer-type", "--vocab-size")
    run = run_of(words if is_mock else f"{words} {chats}", without=without)
    write_config(run, tmp_path / "config.yaml")
    assert name_in((tmp_path / "config.yaml").read_text()) == name
    assert run_from_file(tmp_path / "config.yaml") == run


def test_a_users_flags_are_written_and_read(tmp_path: Path) -> None:
    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--mine", type=int, required=True)
        return parser

    run = resolve(parse_args(provide, argv=[*argv(), "--mine", "3"]), 1)
    write_config(run, tmp_path / "config.yaml")
    again = run_from_file(tmp_path / "config.yaml", provider=provide)
    assert again.extra == {"mine": 3}
    assert again == run


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    write_config(run_of("--seed 5 --swiglu"), tmp_path / "config.yaml")
    run = run_from_file(tmp_path / "config.yaml", "--seed", "6")
    assert (run.training.seed, run.model.gated_linear_unit) == (6, True)


def test_keys_may_be_spelt_as_flags_fields_or_under_the_reference_headings(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.json"
    file.write_text(
        json.dumps(
            {
                "language_model": {"layernorm_epsilon": 1e-6, "num-layers": 2},
                "model_parallel": {"tensor_model_parallel_size": 2},
                "persist_layer_norm": False,
                "data_path": "one",
            }
        )
    )
    args = parse_args(argv=["--yaml-cfg", str(file)])
    assert (args.norm_epsilon, args.num_layers, args.tensor_model_parallel_size) == (1e-6, 2, 2)
    assert (args.no_persist_layer_norm, args.data_path) == (True, ["one"])


VALUES = """
lr: 1e-5
min-lr: "1e-6"
data-path: [0.3, a, 0.7, b]
train-data-path: one file
window-size: 8,0
window-attn-skip-freq: "[1,0]*2"
moe-layer-freq: [1, 0]
rampup-batch-size: [2, 2, 16]
split: 95,5,0
no-save-rng: true
disable-bias-linear: true
no-sft-packing: false
swiglu: true
ffn_hidden_size: null
rope-type: ~
position-embedding-type: none
profile-ranks: 0
save: "runs/it's 5"
"""


def test_values_are_read_as_a_reader_of_the_file_expects(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "run.yaml").write_text(VALUES)
    found = vars(parse_args(argv=["--config", str(tmp_path / "run.yaml")]))
    expected = {
        "lr": 1e-5,
        "min_lr": 1e-6,
        "data_path": ["0.3", "a", "0.7", "b"],
        "train_data_path": ["one file"],
        "window_size": (8, 0),
        "window_attn_skip_freq": (1, 0, 1, 0),
        "moe_layer_freq": (1, 0),
        "rampup_batch_size": [2, 2, 16],
        "split": "95,5,0",
        "no_save_rng": True,
        "add_bias_linear": False,
        "sft_packing": True,
        "swiglu": True,
        "ffn_hidden_size": None,
        "rope_type": None,
        "position_embedding_type": "none",
        "profile_ranks": [0],
        "save": "runs/it's 5",
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_key_train_sets_the_objective_and_the_file_its_values(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.json"
    monkeypatch.setattr("sys.argv", [f"folder/{PROGRAMS[name].file}"])
    file.write_text(json.dumps({"train": name}))
    found = vars(parse_args(argv=["--config", str(file)]))
    assert all(found[dest] in (True, 0.1) for dest in PROGRAMS[name].settings)
    assert PROGRAMS[name].flags in ([], ["--sft"], ["--dpo-beta", "0.1"], ["--reward-model"])
    file.write_text(json.dumps({"dpo-beta": 0.3, "train": name}))
    assert parse_args(argv=["--config", str(file)]).dpo_beta == 0.3


@pytest.mark.parametrize("indent", [None, 0, 1, 2, 4, "\t"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_train_is_found_in_json_of_any_form_and_after_a_byte_order_mark(
    tmp_path: Path, indent: int | str | None, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py"])
    file = tmp_path / "run.json"
    file.write_text(mark + json.dumps({"train": "sft", "seed": 5}, indent=indent))
    assert name_in(file.read_text()) == name_in(f"{mark}train: sft\nseed: 5\n") == "sft"
    assert parse_args(argv=["--config", str(file)]).sft
    assert name_in("note: |\n  train: sft\nbase: {train: sft}\n") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mamba", "train: mamba needs pretrain_mamba.py, and this is pretrain_gpt.py: start "),
        ("sftt", "train: sftt: not one of gpt, sft, dpo, .* \\(did you mean sft\\?\\)"),
    ],
)
def test_a_program_refuses_a_file_of_another_one(
    tmp_path: Path,
    name: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"train": name}))
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py"])
    with pytest.raises(SystemExit):
        parse_args(argv=["--config", str(tmp_path / "run.json")])
    assert re.search(f"--config {tmp_path}/run.json: {message}", capsys.readouterr().err)


def test_a_program_may_have_a_flag_config_of_its_own(tmp_path: Path) -> None:
    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--config")
        return parser

    (tmp_path / "run.json").write_text('{"seed": 5}')
    words = ["--config", "mine.py", "--yaml-cfg", str(tmp_path / "run.json")]
    args = parse_args(provide, argv=words)
    assert (args.config, args.seed) == ("mine.py", 5)
    assert parse_args(provide, argv=["--config", "mine.py"]).yaml_cfg is None


def test_mistakes_in_a_file_are_reported_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    file.write_text(
        json.dumps({"hiden_size": 4, "bf16": 1, "num_layers": "x", "optimizer": "adma", "lr": True})
    )
    with pytest.raises(SystemExit) as ended:
        parse_args(argv=["--yaml-cfg", str(file)])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert f"--yaml-cfg {file}: hiden_size is not a flag: did you mean hidden_size?" in text
    assert f"--yaml-cfg {file}: bf16: 1 is not true or false" in text
    assert f"--yaml-cfg {file}: lr: True is not a value" in text
    assert "--num-layers x: a whole number is needed" in text
    assert (
        "--optimizer adma: not one of adam, sgd, lion, muon, dist_muon, soap (did you mean adam?)"
        in text
    )


def test_a_missing_file_or_another_shape_is_an_error(tmp_path: Path) -> None:
    for flag in ("--yaml-cfg", "--config"):
        with pytest.raises(ConfigError, match=rf"^{flag} .*none\.yaml: no such file"):
            parse_args(argv=[flag, str(tmp_path / "none.yaml")])
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="a mapping of flags to values is needed"):
        parse_args(argv=["--yaml-cfg", str(tmp_path / "list.json")])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"seed: 5 # caf\xe9\n", "not UTF-8 text .*0xe9 in position 13"),
        (b"\xff\xfes\x00", "not UTF-8 text"),
        (b"[" * 100_000, "not YAML: .*nested too deep"),
        (b'{"a":' * 100_000, "not YAML: .*nested too deep"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "not YAML: .*4300 digits"),
        (b"", "a mapping of flags to values is needed"),
        (b"\x00", "not YAML"),
        (b"seed: 2026-13-45", "not YAML: .*month must be in 1..12"),
        (b"seed: !!bool maybe", "not YAML: .*KeyError"),
        (b"seed: !!int ''", "not YAML"),
        (b"seed: !!timestamp x", "not YAML"),
        (b"&a [*a]", "not YAML: .*nested too deep"),
        (b"seed: 0x" + b"f" * 5000, "not YAML: a number has more than 4096 bits"),
        (b"lr: 1e-5\nmin-lr: 0\nlr: 1e-6", "not YAML: lr is given twice; remove one"),
        (b"seed: " + b"1:" * 3000 + b"1", "not YAML: a number has more than 4096 bits"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_config_error(
    tmp_path: Path, content: bytes, message: str
) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^--yaml-cfg {file}: {message}"):
        parse_args(argv=["--yaml-cfg", str(file)])


@pytest.mark.parametrize("content", [b"\xe9", b'{"a":' * 100_000])
def test_a_file_that_cannot_be_read_is_one_config_error_without_pyyaml(
    tmp_path: Path, content: bytes, fake_yaml: None
) -> None:
    file = tmp_path / "run.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^--yaml-cfg {file}: "):
        parse_args(argv=["--yaml-cfg", str(file)])


class FakeYaml:
    """Enough of PyYAML: ``key: value`` lines."""

    class YAMLError(Exception):
        pass

    BaseLoader = SafeLoader = None

    @staticmethod
    def compose(text: str, Loader: object) -> None:
        """Find no nodes, in which keys would be counted."""

    @staticmethod
    def load(text: str, Loader: object) -> dict[str, object]:
        if "\t" in text:
            raise FakeYaml.YAMLError("found a tab\n  in line 1")
        return dict(line.split(": ", 1) for line in text.splitlines())


@pytest.fixture
def fake_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("megatron.core.text_files")
    monkeypatch.setattr(module, "require", lambda package, wanted_by: FakeYaml)


def test_variables_in_yaml_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_yaml: None
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data_path: ${CORPUS_DIR}/text\nseed: 5")
    monkeypatch.setenv("CORPUS_DIR", "/corpus")
    args = parse_args(argv=["--yaml-cfg", str(file)])
    assert (args.data_path, args.seed) == (["/corpus/text"], 5)
    monkeypatch.delenv("CORPUS_DIR")
    with pytest.raises(ConfigError, match="environment variable CORPUS_DIR is not set; export it"):
        parse_args(argv=["--yaml-cfg", str(file)])


def test_broken_yaml_is_one_sentence(tmp_path: Path, fake_yaml: None) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("a:\tb")
    with pytest.raises(ConfigError, match="not YAML: found a tab in line 1"):
        parse_args(argv=["--yaml-cfg", str(file)])


def test_yaml_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optional, "why_missing", lambda package: f"{package} is not installed")
    file = tmp_path / "run.yaml"
    file.write_text("seed: 5")
    with pytest.raises(MissingDependency, match=r'pip install "megatron-train\[yaml\]"'):
        parse_args(argv=["--yaml-cfg", str(file)])
