"""Tables that user code extends, and --import-module."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.registry import Registry
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.config.language_model import MODEL_KINDS
from megatron.training.conversion.hf import choose_family
from megatron.training.conversion.shape import ModelShape
from megatron.training.models import model_kind, register_model_kind
from megatron.training.models.registry import model_kind_of
from tests.support.command_lines import argv

KIND_MODULE = """
from dataclasses import replace
from megatron.training.models import model_kind, register_model_kind

def problems(run):
    if run.model.num_moe_experts:
        yield "--num-experts with my-gpt: it has none; use pretrain_gpt.py"

register_model_kind(
    "my-gpt",
    replace(
        model_kind("gpt"),
        title="MyGPT",
        entry_script="pretrain_my_gpt.py",
        supports_context_parallel=False,
        problems=problems,
    ),
)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with a user's modules; what they register is forgotten afterwards."""
    (tmp_path / "users_kind.py").write_text(KIND_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(MODEL_KINDS, "_values", {})
    monkeypatch.delitem(sys.modules, "users_kind", raising=False)
    return tmp_path


def test_a_registry_has_the_names_of_both_and_imports_what_is_asked_for() -> None:
    registry = Registry[object]("--x", {"a": "json:dumps", "b": "no_such_module:NAME"})
    registry.register("mine", 7)
    assert list(registry) == ["a", "b", "mine"]
    assert len(registry) == 3
    assert registry["a"] is sys.modules["json"].dumps
    assert "b" in registry
    assert [1] not in registry


@pytest.mark.parametrize("name", ["a", "two words", ""])
def test_a_name_that_cannot_be_registered_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="registered"):
        Registry[object]("--x", {"a": "json:dumps"}).register(name, 1)


def test_a_kind_of_a_module_of_the_user_is_a_choice() -> None:
    words = argv("--import-module users_kind --model-kind my-gpt")
    run = resolve(parse_args(argv=words), 1)
    assert model_kind_of(run).title == "MyGPT"
    assert run.extensions.import_module == ("users_kind",)


def test_a_yaml_file_may_name_the_module(folder: Path) -> None:
    (folder / "run.yaml").write_text('{"import_module": "users_kind", "model_kind": "my-gpt"}')
    run = resolve(parse_args(argv=argv("--yaml-cfg run.yaml")), 1)
    assert model_kind_of(run).title == "MyGPT"


def test_rules_of_the_kind_are_reported_with_the_others() -> None:
    words = "--import-module users_kind --model-kind my-gpt --num-experts 2 --hidden-size 7"
    with pytest.raises(ConfigError) as error:
        resolve(parse_args(argv=argv(f"{words} --context-parallel-size 2")), 2)
    assert "--num-experts with my-gpt: it has none" in str(error.value)
    assert "--context-parallel-size 2 with MyGPT: MyGPT does not support" in str(error.value)
    assert "--hidden-size 7" in str(error.value)


def test_mistakes_of_the_command_line_are_reported_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "--import-module no_such_module --model-kind my-gpt --no-such-flag"
    with pytest.raises(SystemExit):
        parse_args(argv=argv(words))
    text = capsys.readouterr().err
    assert "--import-module no_such_module: No module named 'no_such_module'" in text
    assert "--model-kind my-gpt: not one of gpt, bert, mamba, mimo, retro, t5, vit, vlm" in text
    assert "--no-such-flag is not a flag" in text


def test_a_kind_that_nobody_registered_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"my-gpt: not one of gpt, .*--import-module"):
        model_kind("my-gpt")


def test_what_is_no_description_is_refused() -> None:
    with pytest.raises(ConfigError, match="no ModelKind"):
        register_model_kind("my-gpt", "gpt")  # type: ignore[arg-type]


def test_hugging_face_has_no_family_of_a_registered_kind() -> None:
    register_model_kind("my-gpt", replace(model_kind("gpt"), title="MyGPT"))
    sizes = "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups".split()
    sizes += ["kv_channels", "max_position_embeddings", "vocab_size"]
    shape = ModelShape(kind="my-gpt", **dict.fromkeys(sizes, 8))
    with pytest.raises(CheckpointError, match="this one is of kind my-gpt: use another --format"):
        choose_family(shape, None)
