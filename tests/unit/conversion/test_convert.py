"""What a conversion takes along, what it takes off, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.dist_checkpointing.formats import FORMATS, open_reader
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.conversion.convert import BESIDE, HF, ConversionRequest, convert, read_source
from megatron.training.conversion.families import FAMILIES
from megatron.training.conversion.tensors import Rule
from tests.support import hugging_face_models as models
from tests.support.reference_checkpoints import unpack
from tests.support.tokenizer_files import SPM_MODEL, write_bpe
from tools.checkpoint import convert as tool

OURS = "safetensors_dist"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as `transformers` writes it."""
    folder = tmp_path_factory.mktemp("llama") / "hf"
    models.write(folder, "llama")
    return folder


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in llama.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def quietly(source: Path, target: Path, format: str = OURS, **more: object) -> Path:
    said: list[str] = []
    more.setdefault("verify", False)
    return convert(
        ConversionRequest(source=source, target=target, format=format, **more), said.append
    )


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    held = models.weights(folder)
    change(held)
    models.safetensors.save_file(held, folder / "model.safetensors", {"format": "pt"})


def test_parts_with_an_index_are_written_and_read(llama: Path, tmp_path: Path) -> None:
    quietly(llama, tmp_path / "ours")
    parts = quietly(tmp_path / "ours", tmp_path / "parts", HF, max_shard_bytes=40_000)
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in parts.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert all((parts / name).stat().st_size < 50_000 for name in files)
    models.assert_same_weights(parts, llama)
    assert models.logits_of(parts, models.prompts())[1] == ""
    again = quietly(parts, tmp_path / "again")
    found, expected = (models.weights(f) for f in (again, tmp_path / "ours" / "release"))
    assert all(torch.equal(found[name], expected[name]) for name in found | expected)


def test_a_file_of_pytorch_is_read_and_one_that_would_run_code_is_not(
    llama: Path, copy: Path, tmp_path: Path
) -> None:
    (copy / "model.safetensors").unlink()
    torch.save(models.weights(llama), copy / "pytorch_model.bin")
    quietly(copy, tmp_path / "ours")
    quietly(tmp_path / "ours", tmp_path / "back", HF)
    models.assert_same_weights(tmp_path / "back", llama)
    torch.save({"lm_head.weight": _Bomb(tmp_path / "it ran")}, copy / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin holds more than tensors"):
        quietly(copy, tmp_path / "other")
    assert not (tmp_path / "it ran").exists()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.feature("Checkpoints: tokenizer, generation config and chat template travel along")
def test_what_lies_beside_the_weights_comes_along_and_is_used(copy: Path, tmp_path: Path) -> None:
    write_bpe(tmp_path, 300)  # more ids than the model has rows would not do: cut it down
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    size = len(rules["model"]["vocab"]) + len(rules["added_tokens"])
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (copy / name).write_bytes((tmp_path / name).read_bytes())
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    edit_config(copy, vocab_size=size + 5)

    def grow(held: dict[str, torch.Tensor]) -> None:
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            held[name] = torch.randn(size + 5, 32)

    edit_weights(copy, grow)
    quietly(copy, tmp_path / "ours", verify=True)
    asked = open_checkpoint(tmp_path / "ours").asked
    assert asked["tokenizer_type"] == "HuggingFaceTokenizer"
    assert asked["tokenizer_model"] == str(tmp_path / "ours" / BESIDE)
    assert (asked["padded_vocab_size"], asked["pad_vocab_in_loss"]) == (size + 5, True)
    back = quietly(tmp_path / "ours", tmp_path / "back", HF)
    kept = {"tokenizer.json", "merges.txt", "chat_template.jinja", "generation_config.json"}
    assert kept <= {path.name for path in back.iterdir()}
    assert all((back / name).read_bytes() == (copy / name).read_bytes() for name in kept)


def test_padding_of_the_vocabulary_is_left_behind(llama: Path, tmp_path: Path) -> None:
    quietly(llama, tmp_path / "ours")
    back = quietly(tmp_path / "ours", tmp_path / "back", HF, vocab_size=90)
    found, expected = models.weights(back), models.weights(llama)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(found[name], expected[name][:90])
    assert json.loads((back / "config.json").read_text())["vocab_size"] == 90


@pytest.mark.parametrize("format", ["torch_dist", "torch"])
def test_padding_of_another_layout_is_left_behind(llama: Path, tmp_path: Path, format: str) -> None:
    """The stored padding is that of four ranks, the stored arguments are those of one."""
    wide = {"padded_vocab_size": 512, "tensor_model_parallel_size": 1}
    quietly(llama, tmp_path / "theirs", format, args=wide)
    quietly(tmp_path / "theirs", tmp_path / "ours")
    quietly(tmp_path / "theirs", tmp_path / "back", HF)
    with open_reader(open_checkpoint(tmp_path / "theirs").folder) as reader:
        assert reader.tensors["output_layer.weight"].shape[0] == 512
        assert reader.tensors["output_layer.weight"].max_padding == 512 - 96
    with open_reader(open_checkpoint(tmp_path / "ours").folder) as reader:
        assert reader.tensors["output_layer.weight"].shape[0] == 96
    models.assert_same_weights(tmp_path / "back", llama)


def test_another_dtype_only_when_asked(llama: Path, tmp_path: Path) -> None:
    quietly(llama, tmp_path / "ours", dtype=torch.bfloat16)
    assert open_checkpoint(tmp_path / "ours").asked["bf16"] is True
    back = quietly(tmp_path / "ours", tmp_path / "back", HF)
    expected = models.weights(llama)
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"
    for name, tensor in models.weights(back).items():
        assert torch.equal(tensor, expected[name].bfloat16()), name


def test_an_output_layer_that_repeats_the_embedding_is_left_out(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    models.write(theirs, "qwen2")
    embedding = models.weights(theirs)["model.embed_tokens.weight"]
    edit_weights(theirs, lambda held: held.update({"lm_head.weight": embedding.clone()}))
    quietly(theirs, tmp_path / "ours")
    edit_weights(theirs, lambda held: held.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed_tokens"):
        quietly(theirs, tmp_path / "other")


def test_names_without_the_model_in_front_and_constant_buffers(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    models.write(theirs, "gpt2")

    def as_it_was_published(held: dict[str, torch.Tensor]) -> None:
        for name in list(held):
            held[name.removeprefix("transformer.")] = held.pop(name)
        held["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)

    edit_weights(theirs, as_it_was_published)
    quietly(theirs, tmp_path / "ours", verify=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda held: held.pop("model.norm.weight"), "the weights have no model.norm.weight"),
        (
            lambda held: held.update(extra=torch.ones(1)),
            "1 tensors have no place in a Llama.*extra",
        ),
        (
            lambda held: held.update({"model.norm.weight": torch.ones(31)}),
            r"model.norm.weight \[31\]: config.json asks for \[32\] in decoder.final_layernorm",
        ),
        (
            lambda held: held.update(
                {"model.layers.1.self_attn.q_proj.weight": torch.ones(30, 32)}
            ),
            r"q_proj.weight \[30, 32\].* asks for \[32, 32\], .* in decoder.layers.1",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(
    copy: Path, tmp_path: Path, change: Callable[..., object], sentence: str
) -> None:
    edit_weights(copy, change)
    with pytest.raises(CheckpointError, match=sentence):
        quietly(copy, tmp_path / "ours")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "bloom"}, "model_type bloom: the families here are llama"),
        ({"mlp_bias": True}, "attention_bias False and mlp_bias True"),
        ({"hidden_act": "relu"}, "hidden_act relu, which is not built here"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type dynamic"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method aqlm: read are gptq"),
    ],
)
def test_models_that_are_not_here_are_named(
    copy: Path, tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    edit_config(copy, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        quietly(copy, tmp_path / "ours")


def test_damaged_and_missing_files_are_named(copy: Path, tmp_path: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="model.safetensors is damaged: it has"):
        quietly(copy, tmp_path / "ours")
    path.unlink()
    with pytest.raises(CheckpointError, match="has neither model.safetensors nor"):
        quietly(copy, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        quietly(tmp_path / "nothing", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_conversion_that_computes_something_else_is_not_kept(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quietly(llama, tmp_path / "ours")
    family = FAMILIES["llama"]
    swapped = Rule(("mlp.up_proj.weight", "mlp.gate_proj.weight"))
    wrong = replace(family, layer={**family.layer, "mlp.linear_fc1.weight": swapped})
    monkeypatch.setitem(FAMILIES, "llama", wrong)
    with pytest.raises(CheckpointError, match="the logits of both forms differ by"):
        quietly(llama, tmp_path / "wrong", verify=True)
    with pytest.raises(CheckpointError, match="the logits of both forms differ by"):
        quietly(tmp_path / "ours", tmp_path / "wrong", HF, verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_target_that_is_there_is_left_alone(llama: Path, tmp_path: Path) -> None:
    quietly(llama, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="is there already"):
        quietly(tmp_path / "ours", llama, HF)


@pytest.mark.feature("Checkpoints: what Megatron-LM wrote goes to Hugging Face")
def test_a_checkpoint_of_the_reference_goes_to_hugging_face(tmp_path: Path) -> None:
    source = unpack(tmp_path, "gpt_torch_dist")
    said: list[str] = []
    wanted = ConversionRequest(
        source=source,
        target=tmp_path / "hf",
        format=HF,
        args={"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": str(SPM_MODEL)},
    )
    convert(wanted, said.append)
    assert "agree within" in said[0]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["activation_function"]) == ("gpt2", "gelu")


def test_optimizer_and_counters_stay_between_our_formats(tmp_path: Path) -> None:
    source = unpack(tmp_path, "gpt_torch_tp2pp2_distopt")
    quietly(source, tmp_path / "ours")
    before, after = (
        read_source(ConversionRequest(source=folder, target=tmp_path, format=OURS))
        for folder in (source, tmp_path / "ours")
    )
    assert before.tensors.keys() == after.tensors.keys()
    assert any(key.startswith("optimizer.state.exp_avg.") for key in after.tensors)
    assert all(
        torch.equal(t.make(), after.tensors[key].make()) for key, t in before.tensors.items()
    )
    before.common["args"]["model_kind"] = "gpt"  # which the reference does not say
    assert before.common == after.common
    assert before.rank_states == after.rank_states
    assert len(after.rank_states) == 4


@pytest.mark.parametrize("format", ["torch_dist", "torch", "torch_dcp"])
def test_optimizer_and_random_states_go_between_formats_of_the_reference(
    tmp_path: Path, format: str
) -> None:
    source = unpack(tmp_path, "gpt_torch_tp2pp2_distopt")
    quietly(source, tmp_path / format, format)
    before, after = (
        read_source(ConversionRequest(source=folder, target=tmp_path, format=OURS))
        for folder in (source, tmp_path / format)
    )
    assert before.tensors.keys() == after.tensors.keys()
    assert all(
        torch.equal(t.make(), after.tensors[key].make()) for key, t in before.tensors.items()
    )
    assert before.common["optimizer"]["step"] == after.common["optimizer"]["step"]
    assert before.rank_states == after.rank_states


@pytest.mark.feature("Checkpoints: Hugging Face models go to Megatron-LM's formats, in any layout")
@pytest.mark.parametrize(
    ("format", "layout"), [("torch_dist", {}), ("torch", {}), ("torch", {"tp": 2, "pp": 2})]
)
def test_formats_of_the_reference(tmp_path: Path, format: str, layout: dict[str, int]) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    models.write(theirs, "qwen2", num_hidden_layers=4)
    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}
    args = {names[axis]: size for axis, size in layout.items()}
    folder = quietly(theirs, ours, format, args=args)
    assert folder.name == "release"
    if layout:
        found = sorted(path.name for path in folder.glob("mp_rank_*"))
        assert found == [f"mp_rank_0{tp}_00{pp}" for tp in range(2) for pp in range(2)]
    content = open_checkpoint(ours)
    multiple = 128 * layout.get("tp", 1)
    assert content.asked["padded_vocab_size"] == multiple
    quietly(ours, tmp_path / "back", HF)
    models.assert_same_weights(tmp_path / "back", theirs)


def test_experts_that_were_cut_are_cut_anew(tmp_path: Path) -> None:
    models.write(tmp_path / "theirs", "mixtral", num_hidden_layers=2)
    cut = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    quietly(tmp_path / "theirs", tmp_path / "ours", args=cut)
    whole = {"tensor_model_parallel_size": 1}
    folder = quietly(tmp_path / "ours", tmp_path / "torch", "torch", args=whole)
    assert [path.name for path in folder.glob("mp_rank_*")] == ["mp_rank_00"]


@pytest.mark.parametrize("format", [*FORMATS, HF])
def test_every_file_and_folder_that_is_written_is_fsynced(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    source = llama
    if format == HF:
        source = tmp_path / "ours"
        quietly(llama, source)
    durable: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda file: durable.add(os.fstat(file).st_ino))
    quietly(source, tmp_path / "out", format)
    written = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert [path for path in written if path.stat().st_ino not in durable] == []
    assert any(path.name == "generation_config.json" for path in written)


REFERENCE = (
    "--model-type GPT --loader llama_mistral --checkpoint-type hf --model-size llama3 --bf16 "
    "--saver mcore --target-tensor-parallel-size 2 --target-pipeline-parallel-size 1 "
    "--loader-transformer-impl local --saver-transformer-impl local --no-checking "
    "--megatron-path /somewhere --max-queue-size 5 --load-dir {source} --save-dir {target}"
)


@pytest.mark.feature("Tools: tools/checkpoint/convert.py takes the reference's command line")
def test_the_command_line_of_the_reference(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.main(REFERENCE.format(source=llama, target=tmp_path / "ours").split())
    asked = open_checkpoint(tmp_path / "ours").asked
    assert asked["tensor_model_parallel_size"] == 2
    assert asked["bf16"] is True
    said = capsys.readouterr().out
    assert "the logits of 3 prompts agree within" in said
    for flag in ("--no-checking", "--megatron-path", "--max-queue-size", "--model-size"):
        assert f"note: {flag} is without effect" in said


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--saver llava", "--saver llava: Megatron-LM.s files of models that read images"),
        ("--loader mine", "--loader mine: plug-ins are not loaded by name; there are core"),
        ("--model-type BERT", "is of kind gpt, not bert"),
        ("--checkpoint-type meta", "Meta's own files are not read"),
        ("--target-expert-parallel-size 2", "--expert-model-parallel-size 2 needs --num-experts"),
        ("--tensor-parallel 3", "--num-attention-heads 4 cannot be split over"),
        ("--format hf --family opt", "--family opt: the families of a gpt are"),
        ("--format hf --family gemma", "the nearest, GemmaForCausalLM has no apply_layernorm_1p"),
    ],
)
def test_what_is_not_served_is_said(llama: Path, tmp_path: Path, flags: str, sentence: str) -> None:
    is_export = flags.startswith("--format")
    source = quietly(llama, tmp_path / "ours") if is_export else llama
    argv = ["--from", str(source), "--to", str(tmp_path / "out"), "--no-verify", *flags.split()]
    with pytest.raises((CheckpointError, ConfigError), match=sentence):
        tool.main(argv)
    assert not (tmp_path / "out").exists()


def test_without_transformers_the_comparison_says_so(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "megatron.core.optional.why_missing", lambda package: f"{package} is not installed"
    )
    said: list[str] = []
    convert(ConversionRequest(source=llama, target=tmp_path / "ours", format=OURS), said.append)
    assert "the logits were not compared: transformers is not installed" in said[1]


def test_a_name_of_the_hub_is_told_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--from org/name holds no checkpoint.*config\.json"):
        quietly(Path("org/name"), tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"name the folder that save_pretrained\(\) or a"):
        quietly(tmp_path, tmp_path / "ours")


def test_the_help_is_the_same_in_every_process() -> None:
    """Whatever the order of a set: flags stand in the order of the table."""
    flags = [f"--{name.replace('_', '-')}" for name in tool.WITHOUT_EFFECT if name != "no_checking"]
    actions = [flag for each in tool.get_parser()._actions for flag in each.option_strings]
    assert [flag for flag in actions if flag in flags] == flags
