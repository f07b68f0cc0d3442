"""BERT, T5, Mamba-2 and hybrids of Hugging Face come in, and go out bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.conversion import hf, hf_folder
from megatron.training.conversion.convert import (
    BESIDE,
    HF,
    ConversionRequest,
    convert,
    read_source,
    run_config,
)
from megatron.training.conversion.verify import our_logits, our_model
from tests.support import hugging_face_models as models
from tests.support import tolerances
from tools.checkpoint import hybrid_conversion

ORIGINAL = {"original_max_position_embeddings": 32}


def read(folder: Path) -> hf.HFModel:
    return hf.import_model(hf_folder.read_config(folder), hf_folder.read_weights(folder))


def written(model: hf.HFModel) -> dict[str, torch.Tensor]:
    made = hf.export_model(model.shape, model.tensors, model.family)
    return {tensor.name: tensor.make() for tensor in made}


def quietly(source: Path, target: Path, format: str = "safetensors_dist", **more: Any) -> list[str]:
    said: list[str] = []
    more.setdefault("verify", False)
    convert(ConversionRequest(source=source, target=target, format=format, **more), said.append)
    return said


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.feature(
    "Checkpoints: BERT, Megatron-BERT, T5 (original and 1.1), Mamba-2 and Nemotron-H from and to "
    "Hugging Face, bit for bit"
)
@pytest.mark.parametrize("case", models.OTHERS)
def test_a_family_in_and_out(case: str, tmp_path: Path) -> None:
    theirs, ours, back, again = (tmp_path / name for name in ("theirs", "ours", "back", "again"))
    model = models.write(theirs, case)
    quietly(theirs, ours)
    # Built from nothing but the arguments in the checkpoint, it computes what theirs does.
    run = run_config(open_checkpoint(ours).asked)
    stored = read_source(ConversionRequest(source=ours, target=back, format=HF))
    ids = models.prompts()
    with torch.no_grad():
        expected = models.outputs_of(model, run, ids)
    for mine, other in zip(
        our_logits(run, stored.tensors, models.VOCABULARY, ids), expected, strict=True
    ):
        torch.testing.assert_close(mine, other, **tolerances.LOGITS)
    mine = our_model(run, stored.tensors, models.VOCABULARY)
    models.assert_gradients_agree(mine, model, run, ids, tmp_path / "gradients")
    # With the config.json that it came with, and with one that is made from our arguments.
    quietly(ours, back, HF)
    models.assert_same_weights(back, theirs)
    shutil.rmtree(ours / BESIDE)
    said = quietly(ours, again, HF, verify=True)
    assert "agree within" in said[0]
    models.assert_same_weights(again, theirs)


@pytest.mark.parametrize("case", models.OTHERS)
def test_every_tensor_goes_back_to_where_it_came_from(case: str, tmp_path: Path) -> None:
    models.write(tmp_path, case)
    model = read(tmp_path)
    assert not model.fresh
    assert_same(written(model), models.weights(tmp_path))
    family = hf.choose_family(model.shape, None)
    assert family is model.family
    with pytest.raises(CheckpointError, match=f"the families of a {model.shape.kind} are"):
        hf.choose_family(model.shape, "llama")
    assert family.shape(json.loads(json.dumps(family.config(model.shape)))) == model.shape


@pytest.mark.parametrize(
    ("case", "changes", "sentence"),
    [
        ("deepseek v2", {"topk_method": "noaux_tc"}, "topk_method noaux_tc, which is not built"),
        ("deepseek v3", {"norm_topk_prob": False}, "norm_topk_prob False: only True"),
        ("deepseek v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05: only 1e-06"),
        ("deepseek v3", {"rope_parameters": {"rope_type": "linear"}}, "rope_type linear: only"),
        (
            "deepseek v3",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4, "mscale": 1.0}},
            "mscale 1.0 and mscale_all_dim None: only equal ones",
        ),
        ("qwen3 moe", {"num_local_experts": None}, "config.json has no num_experts"),
        (
            "phi3",
            {"rope_parameters": {**models.LONG, **ORIGINAL, "factor": 4.0}},
            "factor 4.0 of LongRoPE; .* max_position_embeddings 64 / original_.* 32 only",
        ),
        (
            "phi3",
            {"rope_parameters": {**models.LONG, **ORIGINAL, "attention_factor": 1.5}},
            "attention_factor 1.5 of LongRoPE",
        ),
        ("bert", {"hidden_act": "relu"}, "hidden_act relu: only gelu can be"),
        ("bert", {"is_decoder": True}, "is_decoder True: only False"),
        ("bert", {"position_embedding_type": "relative_key"}, "only absolute can be"),
        ("bert", {"type_vocab_size": 3}, "type_vocab_size 3: only 1 and 2"),
        ("megatron bert", {"tie_word_embeddings": False}, "tie_word_embeddings False: only True"),
        ("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj gated-tanh, which is not"),
        ("t5", {"num_heads": None}, "config.json has no num_heads"),
        ("mamba2", {"use_bias": True}, "use_bias True: only False"),
        ("mamba2", {"time_step_limit": [0.0, 1.0]}, "only steps without limits"),
        ("mamba2", {"expand": 3}, "expand 3, a width of 96: its heads are 64 wide"),
        ("nemotron-h", {"layers_block_type": ["gru"]}, "layers .'gru'.: there are"),
        ("nemotron-h", {"sliding_window": 5}, "sliding_window 5: only None"),
        (
            "nemotron-h, experts",
            {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["gru"]},
            "MTP layers .: there are",
        ),
    ],
)
def test_settings_that_are_not_here_are_named(
    case: str, changes: dict[str, Any], sentence: str
) -> None:
    config = models.make(case).config.to_dict() | changes
    with pytest.raises(CheckpointError, match=sentence):
        hf.family_of(config).shape(config)


@pytest.mark.feature(
    "Checkpoints: heads that a BERT of Hugging Face lacks get values to begin with, and are named"
)
@pytest.mark.parametrize(
    ("task", "lacks", "compared"),
    [
        ("ForMaskedLM", {"binary_head", "pooler"}, "agree within"),
        ("Model", {"binary_head", "lm_head", "output_layer"}, "the weights make none"),
    ],
)
def test_heads_that_a_bert_lacks(task: str, lacks: set[str], compared: str, tmp_path: Path) -> None:
    models.grown(models.BERT_PARTS[task](models.make("bert").config)).save_pretrained(tmp_path)
    model = read(tmp_path)
    assert {name.partition(".")[0] for name in model.fresh} == lacks
    found, there = written(model), models.weights(tmp_path)
    there = {name if name in found else f"bert.{name}": values for name, values in there.items()}
    assert_same({name: found[name] for name in there}, there)
    assert len(found) == len(there) + len(model.fresh)
    said = quietly(tmp_path, tmp_path / "ours", verify=True)
    assert set(said[1].split("no ")[1].split(":")[0].split(", ")) == lacks
    assert compared in said[2]
    again = read(tmp_path).tensors
    assert all(torch.equal(again[name].make(), model.tensors[name].make()) for name in model.fresh)
    assert all(again[name].make().any() for name in model.fresh if name.endswith("weight"))


def test_a_bert_without_pairs_of_sentences_has_one_kind_of_tokens(tmp_path: Path) -> None:
    config = models.make("bert").config
    config.type_vocab_size = 1
    theirs = models.grown(models.BERT_PARTS["ForMaskedLM"](config))
    theirs.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="token_type_embeddings.weight is not zero"):
        read(tmp_path)
    theirs.bert.embeddings.token_type_embeddings.weight.data.zero_()
    theirs.save_pretrained(tmp_path)
    model = read(tmp_path)
    assert not model.shape.has_binary_head
    assert_same(written(model), models.weights(tmp_path))
    assert model.family.config(model.shape)["architectures"] == ["BertForMaskedLM"]


def test_names_in_published_files_that_nobody_writes_now(tmp_path: Path) -> None:
    models.write(tmp_path, "bert")
    config, held = hf_folder.read_config(tmp_path), hf_folder.read_weights(tmp_path)
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in held.items():
        for new, old in older.items():
            name = name.replace(new, old)
        renamed[name] = tensor
    renamed["cls.predictions.decoder.weight"] = held["bert.embeddings.word_embeddings.weight"]
    renamed["cls.predictions.decoder.bias"] = held["cls.predictions.bias"]
    renamed["bert.embeddings.position_ids"] = held["bert.pooler.dense.bias"]
    assert_same(written(hf.import_model(config, renamed)), models.weights(tmp_path))
    renamed["cls.predictions.decoder.bias"] = held["bert.pooler.dense.bias"]
    with pytest.raises(CheckpointError, match="decoder.bias differs from cls.predictions.bias"):
        hf.import_model(config, renamed)


def test_an_output_layer_of_its_own_makes_a_t5_untied(tmp_path: Path) -> None:
    model = models.make("t5 1.1")
    model.lm_head.weight = torch.nn.Parameter(torch.randn(models.VOCABULARY, 32))
    model.save_pretrained(tmp_path)
    read_back = read(tmp_path)
    assert not read_back.shape.is_tied
    assert read_back.shape.output_scale == 1
    assert_same(written(read_back), models.weights(tmp_path))


@pytest.mark.feature("Tools: tools/checkpoint/hybrid_conversion.py cuts a hybrid for any TP and PP")
def test_a_hybrid_is_cut_for_another_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours, cut, back = (tmp_path / name for name in ("theirs", "ours", "cut", "back"))
    models.write(theirs, "nemotron-h", hybrid_override_pattern="M-M*")
    quietly(theirs, ours)
    flags = f"--load-dir {ours} --save-dir {cut} --target-tp-size 2 --target-pp-size 2"
    hybrid_conversion.main([*flags.split(), "--mamba2-n-groups", "2", "--reset-iterations"])
    assert "--mamba2-n-groups is without effect" in capsys.readouterr().out
    ranks = sorted(path.name for path in cut.rglob("mp_rank_*"))
    assert ranks == [f"mp_rank_0{tp}_00{pp}" for tp in range(2) for pp in range(2)]
    quietly(cut, back, HF)
    models.assert_same_weights(back, theirs)
    models.write(tmp_path / "bert", "bert")
    with pytest.raises(CheckpointError, match="is of kind bert, not mamba"):
        hybrid_conversion.main(["--load-dir", str(tmp_path / "bert"), "--save-dir", str(cut)])
    with pytest.raises(ConfigError, match="--mamba-version 1: mixers here are of Mamba-2"):
        hybrid_conversion.main([*flags.split(), "--mamba-version", "1"])
