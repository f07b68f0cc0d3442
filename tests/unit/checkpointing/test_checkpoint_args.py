"""--use-checkpoint-args."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.training.checkpointing.checkpoint_args import apply_checkpoint_args
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.save import save_run
from tests.unit.checkpointing.tiny_run import counters, make_parts, options

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
