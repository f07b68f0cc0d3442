"""Adapters in PEFT's files: read, merged and written, compared with transformers and PEFT."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.errors import CheckpointError
from megatron.core.params.param_info import info_of
from megatron.core.peft.lora import attach_adapters, is_of_adapter, split_name
from megatron.training.config.run import RunConfig
from megatron.training.conversion import hf
from megatron.training.conversion.convert import (
    HF,
    PEFT,
    ConversionRequest,
    convert,
    read_source,
    run_config,
)
from megatron.training.conversion.families.experts import MISTRAL4
from megatron.training.conversion.lazy import as_lazy
from megatron.training.conversion.peft import lora_of, write_peft
from megatron.training.conversion.shape import ModelShape, shape_of
from megatron.training.conversion.tensors import tensors_of
from megatron.training.conversion.verify import our_model, our_outputs

models = pytest.importorskip("tests.support.hugging_face_models", reason="needs transformers")
safetensors = pytest.importorskip("safetensors.torch")

peft = models.peft
needs_peft = pytest.mark.skipif(peft is None, reason="needs peft")

RANK = 3
ALPHA = 6.0
ATTENTION = "q_proj k_proj v_proj o_proj"
MLP = "gate_proj up_proj down_proj"
# case -> target modules by PEFT's names
CASES = {
    "llama": f"{ATTENTION} {MLP} embed_tokens lm_head",
    "qwen2": "q_proj v_proj",
    "gpt2": "c_attn c_fc",
    "phi3": "qkv_proj gate_up_proj down_proj",
    "mixtral": "q_proj o_proj w1 w2 w3",
    "qwen3 moe": f"k_proj experts.{MLP.replace(' ', ' experts.')}",
    "llama with DoRA": f"q_proj v_proj o_proj {MLP} lm_head",
    "phi3 with DoRA": "qkv_proj gate_up_proj",
    "deepseek v2": "q_proj kv_a_proj_with_mqa kv_b_proj o_proj",
    "deepseek v3": "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj",
}
DORA = " with DoRA"
PROMPTS = torch.randint(0, models.VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))
Case = tuple[Any, Path, Path, Path]  # model of transformers, its folder, ours, files of PEFT


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    """A model in both forms, and random adapters in PEFT's."""
    theirs = tmp_path / "hf"
    base = tmp_path / "base"
    files = tmp_path / "peft"
    model = models.make(request.param.removesuffix(DORA)).eval()
    model.save_pretrained(theirs)
    convert(ConversionRequest(source=theirs, target=base, format="safetensors_dist", verify=False))
    source = read_source(ConversionRequest(source=base, target=base, format=HF))
    shape = shape_of(run_config(source.args), models.VOCABULARY)
    family = hf.choose_family(shape, None, model.config.model_type)
    sizes = dict(matrices(shape, family, CASES[request.param].split()))
    weights = model.state_dict() if request.param.endswith(DORA) else {}
    write_adapters(files, sizes, {"use_dora": bool(weights)}, weights)
    return model, theirs, base, files


def matrices(shape: ModelShape, family: Any, targets: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield their name and the shape of each matrix that ``targets`` select."""
    for name, size in tensors_of(shape).items():
        if not name.endswith(".weight") or "norm" in name or "router" in name:
            continue
        rule = family.rule(name, shape)
        like = torch.empty(size, device="meta")
        for theirs, part in zip(rule.theirs, rule.to_theirs(like, shape), strict=True):
            module = theirs.removesuffix(".weight")
            own = re.sub(r"\.experts\.\d+\.", ".experts.", module)
            if any(own.endswith(f".{target}") or own == target for target in targets):
                yield module, part.t() if rule.transposed else part


def write_adapters(
    folder: Path,
    sizes: dict[str, Tensor],
    config: dict[str, object],
    weights: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write random adapters of matrices as PEFT would; with ``weights`` magnitudes too."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for module, like in sizes.items():
        (rows, columns), kind = like.shape, "lora_{}.weight"
        if module.endswith("embed_tokens"):
            rows, columns, kind = columns, rows, "lora_embedding_{}"
        for matrix, size in (("A", (RANK, columns)), ("B", (rows, RANK))):
            value = torch.randn(size, generator=generator) * 0.2
            tensors[f"base_model.model.{module}.{kind.format(matrix)}"] = value
        if weights:
            norms = weights[f"{module}.weight"].norm(dim=1)
            factors = 1 + 0.3 * torch.randn(len(norms), generator=generator)
            tensors[f"base_model.model.{module}.lora_magnitude_vector"] = norms * factors
    safetensors.save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rsplit(".", 1)[-1] for name in sizes})
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(values | config))


def to_ours(files: Path, base: Path) -> Path:
    target = files.with_name("adapters")
    convert(ConversionRequest(source=files, target=target, format="safetensors_dist", base=base))
    return target


def our_logits(adapters: Path, base: Path) -> Tensor:
    """Return the logits of the base with adapters beside its layers."""
    model, run = adapted_model(adapters, base)
    with torch.no_grad():
        return next(our_outputs(model, run, PROMPTS))


@torch.no_grad()
def adapted_model(adapters: Path, base: Path) -> tuple[nn.Module, RunConfig]:
    read = [read_source(ConversionRequest(source=f, target=f, format=HF)) for f in (base, adapters)]
    run = run_config(read[0].args)
    model = our_model(run, read[0].tensors, models.VOCABULARY)
    attach_adapters(model, lora_of(read[1].args))
    params = {info_of(p).name: p for p in model.parameters() if p.requires_grad}
    assert params.keys() == read[1].tensors.keys()
    for name, param in params.items():
        param.copy_(read[1].tensors[name].make())
    return model.eval(), run


@torch.no_grad()
def their_logits(model: Any) -> Tensor:
    return model(PROMPTS, use_cache=False).logits


@pytest.mark.feature("LoRA: adapters of PEFT are read, merged into the base, and written again")
def test_adapters_of_peft_are_read_merged_and_written(case: Case, tmp_path: Path) -> None:
    _, theirs, base, files = case
    adapters = to_ours(files, base)
    stored = read_source(ConversionRequest(source=adapters, target=adapters, format=HF))
    assert all(map(is_of_adapter, stored.tensors))
    found = our_logits(adapters, base)
    # Added by hand to the files of transformers.
    expected = their_logits(with_adapters(theirs, files, tmp_path / "by hand"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    convert(ConversionRequest(source=adapters, target=tmp_path / "merged", format=HF))
    merged = their_logits(models.AUTO.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    convert(ConversionRequest(source=adapters, target=tmp_path / "again", format=PEFT))
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    written, original = (
        safetensors.load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "again", files)
    )
    assert written.keys() == original.keys()
    assert not config["rank_pattern"]
    assert all(torch.equal(written[name], original[name]) for name in original)
    assert config["lora_alpha"] == ALPHA


def with_adapters(theirs: Path, files: Path, target: Path) -> Any:
    """Return their model, loaded from weights to which B A was added."""
    weights = safetensors.load_file(theirs / "model.safetensors")
    adapters = safetensors.load_file(files / "adapter_model.safetensors")
    scale = ALPHA / RANK
    count = 0
    for name, a in adapters.items():
        if "_A" not in name:
            continue
        b = adapters[name.replace("_A", "_B")]
        module = re.split(r"\.lora_", name.removeprefix("base_model.model."))[0]
        weight = weights[f"{module}.weight"]
        delta = b @ a * scale
        weight += delta if delta.shape == weight.shape and "c_" not in module else delta.t()
        if (m := adapters.get(f"base_model.model.{module}.lora_magnitude_vector")) is not None:
            weight *= (m / weight.norm(dim=1)).unsqueeze(1)
            count += 1
        count += 2
    assert count == len(adapters)
    target.mkdir()
    safetensors.save_file(weights, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((theirs / "config.json").read_bytes())
    return models.AUTO.from_pretrained(target)


@needs_peft
def test_peft_computes_our_logits(case: Case, tmp_path: Path) -> None:
    _, theirs, base, files = case
    adapters = to_ours(files, base)
    expected = our_logits(adapters, base)
    convert(ConversionRequest(source=adapters, target=tmp_path / "again", format=PEFT))
    model = models.AUTO.from_pretrained(theirs)
    found = their_logits(peft.PeftModel.from_pretrained(model, tmp_path / "again").eval())
    assert not torch.allclose(expected, their_logits(models.AUTO.from_pretrained(theirs)), 1e-2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@needs_peft
@pytest.mark.feature("LoRA: PEFT's modules_to_save are read, written and merged")
@pytest.mark.parametrize("case", ["llama"], indirect=True)
def test_modules_to_save_go_to_peft_and_back(case: Case, tmp_path: Path) -> None:
    model, theirs, base, files = case
    saved = ["embed_tokens", "lm_head", "norm"]  # the last names all norms
    options = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved)
    adapted = peft.get_peft_model(model, options).eval()
    torch.manual_seed(4)
    with torch.no_grad():
        for param in filter(lambda p: p.requires_grad, adapted.parameters()):
            param.add_(torch.randn_like(param), alpha=0.2)
    adapted.save_pretrained(files)
    expected = their_logits(adapted)
    adapters = to_ours(files, base)
    limit = {"rtol": 1e-5, "atol": 1e-5 * float(expected.abs().max())}
    torch.testing.assert_close(our_logits(adapters, base), expected, **limit)
    convert(ConversionRequest(source=adapters, target=tmp_path / "merged", format=HF))
    merged = their_logits(models.AUTO.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, expected, **limit)
    convert(ConversionRequest(source=adapters, target=tmp_path / "again", format=PEFT))
    again = models.AUTO.from_pretrained(theirs)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "again").eval()
    torch.testing.assert_close(their_logits(again), expected, **limit)
    written, original = (
        safetensors.load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "again", files)
    )
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)


@needs_peft
@pytest.mark.feature("DoRA: logits and gradients equal PEFT's, and its files are read and written")
@pytest.mark.parametrize("case", ["llama with DoRA"], indirect=True)
def test_dora_has_the_gradients_of_peft(case: Case, tmp_path: Path) -> None:
    _, theirs, base, files = case
    model, run = adapted_model(to_ours(files, base), base)
    target = torch.randn(*PROMPTS.shape, models.VOCABULARY, generator=torch.Generator())
    (next(our_outputs(model, run, PROMPTS)) * target).sum().backward()
    their = models.AUTO.from_pretrained(theirs)
    their = peft.PeftModel.from_pretrained(their, files, is_trainable=True).eval()
    (their(PROMPTS, use_cache=False).logits * target).sum().backward()
    expected = {
        (*re.findall(r"layers\.\d+|\w+_proj|lm_head", n), n.split(".lora_")[1][0].lower()): p.grad
        for n, p in their.named_parameters()
        if p.requires_grad
    }
    modules = {"linear_proj": "o_proj", "linear_fc2": "down_proj", "output_layer": "lm_head"}
    found = {}
    for param in model.parameters():
        if param.requires_grad:
            layer, matrix, part = split_name(info_of(param).name)
            module = f"{part}_proj" if part else modules[layer.rsplit(".", 1)[-1]]
            found[(*re.findall(r"layers\.\d+", layer), module, matrix)] = param.grad
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        limit = 1e-4 * float(grad.abs().max())
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=limit, msg=str(name))


@needs_peft
def test_adapters_that_peft_has_saved_are_read(case: Case, tmp_path: Path) -> None:
    model, _, base, files = case
    config = json.loads((files / "adapter_config.json").read_text())
    kind = model.config.model_type
    experts = {"mixtral": ["w1", "w2", "w3"], "qwen3_moe": MLP.split()}.get(kind, [])
    modules = [name for name in config["target_modules"] if name not in experts]
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if experts else None
    options = {"target_modules": modules, "target_parameters": stacks, "alpha_pattern": {}}
    options |= {"use_dora": config.get("use_dora", False)}
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(r=4, lora_alpha=10, rank_pattern={"o_proj": 2}, **options),
    ).eval()
    torch.manual_seed(4)
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_" in name:
                param.normal_(std=0.2)
    adapted.save_pretrained(tmp_path / "saved")
    expected = their_logits(adapted)
    found = our_logits(to_ours(tmp_path / "saved", base), base)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_adapters_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "hf"
    base = tmp_path / "base"
    models.make("llama").save_pretrained(theirs)
    convert(ConversionRequest(source=theirs, target=base, format="safetensors_dist", verify=False))
    layer = torch.empty(32, 32, device="meta")
    for number, (module, config, message) in enumerate(
        (
            ("model.layers.0.self_attn.q_proj", {"peft_type": "LOHA"}, "peft_type LOHA: only LORA"),
            (
                "model.layers.0.self_attn.q_proj",
                {"use_dora": True},
                "q_proj: DoRA needs a lora_magnitude_vector in each layer",
            ),
            ("model.layers.0.self_attn.q_proj", {"bias": "all"}, "has bias all: only none is read"),
            (
                "model.layers.0.self_attn.q_proj",
                {"lora_alpha": 0},
                "has lora_alpha 0: give numbers",
            ),
            ("model.layers.0.self_attn.q_proj", {"alpha_pattern": ["q"]}, "that is not a table of"),
            ("model.layers.0.self_attn.q_proj", {"modules_to_save": 5}, "has modules_to_save 5: "),
            (
                "model.layers.0.self_attn.q_proj",
                {"modules_to_save": ["k_proj"]},
                "has modules_to_save k_proj: .* only lm_head, ",
            ),
            (
                "model.layers.0.self_attn.q_proj",
                {"modules_to_save": ["score"]},
                "has modules_to_save, and adapter_model.safetensors no score.weight",
            ),
            *(
                ("model.layers.0.self_attn.q_proj", {"alpha_pattern": {pattern: 1}}, "the pattern")
                for pattern in ("(", "(.*)*x", "(a|[a-z._0-9]+)+!", ".*.*.*.*x", "a{99999999999}")
            ),
            *(
                ("model.layers.0.self_attn.q_proj", {"lora_dropout": value}, "has lora_dropout .*:")
                for value in ("x", 5, float("nan"), [0.1])
            ),
            ("model.layers.7.self_attn.q_proj", {}, "layers that are not in the model: model.lay"),
            ("model.layers.0.self_attn.k_proj", {}, r"B \[32, 3\], of a matrix that is \[16, 32\]"),
        )
    ):
        files = tmp_path / str(number) / "peft"
        files.parent.mkdir()
        write_adapters(files, {module: layer}, config)
        with pytest.raises(CheckpointError, match=message):
            to_ours(files, base)
    (files / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"adapter_config.json is no JSON: maximum recursion"):
        to_ours(files, base)
    with pytest.raises(CheckpointError, match="give the checkpoint of their model with --base"):
        convert(ConversionRequest(source=files, target=tmp_path / "x", format="safetensors_dist"))
    with pytest.raises(CheckpointError, match="holds a complete model, no adapters"):
        convert(ConversionRequest(source=base, target=tmp_path / "y", format=PEFT))


def test_adapters_of_stacked_experts_are_not_written(tmp_path: Path) -> None:
    """PEFT keeps the adapters of these experts in one tensor, under another name."""
    shape = MISTRAL4.shape(models.make("mistral4").config.to_dict())
    layer = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2"
    sizes = {"a": (RANK, shape.moe_ffn_hidden_size), "b": (shape.hidden_size, RANK)}
    weights = as_lazy({f"{layer}.lora.{name}": torch.ones(size) for name, size in sizes.items()})
    with pytest.raises(CheckpointError, match="all experts in one tensor: the adapter of decoder"):
        write_peft(tmp_path, weights, {"lora_rank": RANK}, shape, MISTRAL4, None)
    assert not [*tmp_path.iterdir()]
