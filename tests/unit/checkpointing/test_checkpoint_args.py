"""--use-checkpoint-args."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import replace

import pytest

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.inference.generation import open_writer
from megatron.training.checkpointing.checkpoint_args import (
    apply_checkpoint_args,
    without_code_and_paths,
)
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.save import save_run
from tests.support.tiny_run import counters, make_parts, options

SAVED = {
    "model_kind": "bert",
    "num_layers": 2,
    "hidden_size": 64,
    "swiglu": True,
    "num_query_groups": 4,
    "rotary_base": 500000,
    "mamba_state_dim": 128,
    "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": "/models/t",
    "tensor_model_parallel_size": 4,
    "num_experts": None,
    "lr": 1e-3,
    "gone_in_this_version": 1,
}


@pytest.fixture
def root(tmp_path):
    save_run(options(tmp_path), make_parts(), counters(1), asked=SAVED)
    return tmp_path


def namespace(root, **more):
    values = dict.fromkeys(SAVED) | {
        "load": None if root is None else str(root),
        "ckpt_step": None,
        "use_tokenizer_model_from_checkpoint_args": True,
        "use_mp_args_from_checkpoint_args": False,
        "tensor_model_parallel_size": 1,
        "swiglu": False,
        "rotary_base": 10000,
    }
    del values["gone_in_this_version"]
    return argparse.Namespace(**values | more)


def test_what_makes_the_model_comes_from_the_checkpoint(root, capsys):
    ns = namespace(root, hidden_size=32, num_experts=8)
    assert apply_checkpoint_args(ns)["lr"] == 1e-3
    assert (ns.swiglu, ns.num_query_groups, ns.rotary_base) == (True, 4, 500000)  # forced
    assert ns.mamba_state_dim == 128
    assert ns.num_layers == 2  # was not given
    assert ns.hidden_size == 32  # was given
    assert ns.num_experts == 8  # the checkpoint does not say
    assert ns.lr is None  # not part of the model
    assert ns.tensor_model_parallel_size == 1
    assert ns.tokenizer_model == "/models/t"
    assert "gone_in_this_version" not in vars(ns)
    assert "Setting swiglu to True from checkpoint" in capsys.readouterr().out.splitlines()


def test_parallel_sizes_and_the_tokenizer_s_path_are_taken_as_asked(root):
    ns = namespace(
        root, use_mp_args_from_checkpoint_args=True, use_tokenizer_model_from_checkpoint_args=False
    )
    apply_checkpoint_args(ns)
    assert ns.tensor_model_parallel_size == 4
    assert ns.tokenizer_model is None
    assert ns.tokenizer_type == "HuggingFaceTokenizer"


def test_another_directory_may_be_named(root):
    ns = namespace(None)
    apply_checkpoint_args(ns, str(root))
    assert ns.num_layers == 2


def test_without_load_it_is_an_error():
    with pytest.raises(ConfigError, match="--use-checkpoint-args needs --load"):
        apply_checkpoint_args(namespace(None))


def test_a_new_run_keeps_its_command_line(tmp_path, capsys):
    ns = namespace(tmp_path)
    before = dict(vars(ns))
    assert apply_checkpoint_args(ns) is None
    assert vars(ns) == before
    assert "holds no checkpoint" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_named(root):
    (root / "iter_0000001" / "common.json").write_text("{}")
    with pytest.raises(CheckpointError, match="common.json has 2 bytes"):
        apply_checkpoint_args(namespace(root))


def test_another_name_of_a_value_is_enough_to_keep_it(root):
    ns = namespace(root, encoder_num_layers=3)
    apply_checkpoint_args(ns)
    assert (ns.num_layers, ns.encoder_num_layers) == (None, 3)


def test_a_checkpoint_of_another_kind_is_refused(root):
    ns = namespace(root)
    apply_checkpoint_args(ns)
    assert ns.model_kind == "bert"
    sentence = "is of kind bert, the command line builds gpt: use pretrain_bert.py"
    with pytest.raises(CheckpointError, match=sentence):
        apply_checkpoint_args(namespace(root, model_kind="gpt"))
    with pytest.raises(CheckpointError, match=sentence):
        load_run(options(root, load=str(root)), replace(make_parts(), kind="gpt"))


GPT_SPECS = "megatron.core.models.gpt.gpt_layer_specs"


def spec_namespace(root, stored, **more):
    """The command line beside a checkpoint that was saved with ``--spec stored``."""
    save_run(options(root), make_parts(), counters(1), asked={"spec": stored})
    return argparse.Namespace(
        **{
            "load": str(root),
            "ckpt_step": None,
            "spec": None,
            "use_tokenizer_model_from_checkpoint_args": True,
            "use_mp_args_from_checkpoint_args": False,
            **more,
        }
    )


@pytest.mark.parametrize(
    "stored",
    [
        ["http.server", "test"],
        ["megatron.training.initialize", "shut_down"],
        ["megatron.core.modelsx", "f"],
        [GPT_SPECS, "get_bias_dropout_add"],  # imported there, not defined there
        [GPT_SPECS, "inspect"],
        [GPT_SPECS, "partial"],
        [GPT_SPECS, "absent"],
        [GPT_SPECS, "__loader__"],
        ["megatron.core.models..os", "system"],
        ["megatron.core.models", "gpt", "x"],
        "os",
        [1, 2],
        {"a": 1},
    ],
)
@pytest.mark.feature("Checkpoints: a stored --spec that is not of this project is never imported")
def test_a_checkpoint_does_not_choose_code(tmp_path, monkeypatch, stored):
    ns = spec_namespace(tmp_path, stored)
    imported: list[str] = []
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda n: imported.append(n) or real(n))
    with pytest.raises(CheckpointError, match="pass --spec MODULE ATTRIBUTE if you trust it"):
        apply_checkpoint_args(ns)
    assert not [name for name in imported if not name.startswith("megatron.core.")]
    with pytest.raises(CheckpointError, match="pass --spec MODULE ATTRIBUTE if you trust it"):
        open_writer(str(tmp_path), device_kind="cpu")


def test_the_command_line_may_choose_what_a_checkpoint_may_not(tmp_path):
    mine = ["tests.support.user_spec", "layer_spec"]
    ns = spec_namespace(tmp_path, mine, spec=mine)
    apply_checkpoint_args(ns)
    assert ns.spec == mine


@pytest.mark.parametrize("stored", [["local"], [GPT_SPECS, "get_gpt_layer_local_spec"]])
def test_specs_of_this_project_are_taken_from_a_checkpoint(tmp_path, stored):
    ns = spec_namespace(tmp_path, stored)
    apply_checkpoint_args(ns)
    assert ns.spec == stored


def test_a_file_that_describes_the_layers_is_not_opened_for_a_checkpoint():
    path = {"heterogeneous_layers_config_path": "/etc/passwd"}
    sentence = "--heterogeneous-layers-config-path /etc/passwd, which is not taken from it"
    with pytest.raises(CheckpointError, match=sentence):
        without_code_and_paths(path, {})
    text = {"heterogeneous_layers_config_encoded_json": "{}"}
    assert without_code_and_paths(path | text, {})["heterogeneous_layers_config_path"] is None
    given = {"heterogeneous_layers_config_path": "mine.json"}
    assert without_code_and_paths(path, given)["heterogeneous_layers_config_path"] is None
