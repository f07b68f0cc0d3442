"""Weights in few bits, and layers that predict further ahead: what Hugging Face folders hold."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.conversion.convert import (
    BESIDE,
    HF,
    ConversionRequest,
    convert,
    read_source,
    run_config,
)
from megatron.training.conversion.lazy import as_lazy
from megatron.training.conversion.quantized import plain_numbers
from megatron.training.conversion.verify import our_model
from tests.support import hugging_face_models as models
from tests.support import selection, tolerances

layers = pytest.importorskip("transformers.modeling_layers")
deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
glm = pytest.importorskip("transformers.models.glm4_moe.modeling_glm4_moe")

OURS = "safetensors_dist"
NEMOTRON = "nemotron-h, experts"
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def rewritten(folder: Path, held: dict[str, Tensor], **changes: Any) -> None:
    models.safetensors.save_file(held, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def converted(source: Path, target: Path, format: str) -> list[str]:
    said: list[str] = []
    convert(ConversionRequest(source=source, target=target, format=format), said.append)
    return said


@pytest.mark.feature("Checkpoints: gpt-oss is read from its 4-bit weights (mxfp4)")
def test_four_bits_are_read_as_the_numbers_they_stand_for(tmp_path: Path) -> None:
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    models.write(packed, "gpt-oss", intermediate_size=64)
    models.write(plain, "gpt-oss", intermediate_size=64)
    few, many = ({k: v.bfloat16() for k, v in models.weights(f).items()} for f in (packed, plain))
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in many if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = few.pop(name).shape
        shape = (experts, rows, columns // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, shape[:3], generator=generator, dtype=torch.uint8)
        few |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = torch.empty(experts, rows, columns)
        for place in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
            e, r, g, b = place
            byte, scale = int(blocks[e, r, g, b]), 2.0 ** (int(scales[e, r, g]) - 127)
            values[e, r, 32 * g + 2 * b] = FP4[byte % 16] * scale
            values[e, r, 32 * g + 2 * b + 1] = FP4[byte // 16] * scale
        many[name] = values.transpose(1, 2).contiguous().bfloat16()
    rewritten(packed, few, quantization_config={"quant_method": "mxfp4"}, dtype="bfloat16")
    rewritten(plain, many, dtype="bfloat16")
    said = converted(packed, tmp_path / "ours", OURS)
    assert "theirs are of weights in few bits" in said[1]
    converted(tmp_path / "ours", tmp_path / "back", HF)  # compares logits too
    models.assert_same_weights(tmp_path / "back", plain)
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


@pytest.mark.feature("Checkpoints: DeepSeek V3 is read from its 8-bit weights (fp8)")
def test_eight_bits_are_read_with_the_factor_of_their_square(tmp_path: Path) -> None:
    models.write(tmp_path / "theirs", "deepseek v3")
    held = models.weights(tmp_path / "theirs")
    name = "model.layers.0.mlp.up_proj.weight"
    small = held[name].to(torch.float8_e4m3fn)
    factors = torch.rand(-(-small.shape[0] // 16), -(-small.shape[1] // 24))
    expected = torch.empty(small.shape)
    for row in range(small.shape[0]):
        for column in range(small.shape[1]):
            expected[row, column] = float(small[row, column]) * factors[row // 16, column // 24]
    held = {k: v if "e_score" in k else v.bfloat16() for k, v in held.items()}
    held |= {name: small, f"{name}_scale_inv": factors}
    told = {"quant_method": "fp8", "weight_block_size": [16, 24]}
    rewritten(tmp_path / "theirs", held, quantization_config=told)
    converted(tmp_path / "theirs", tmp_path / "ours", OURS)
    converted(tmp_path / "ours", tmp_path / "back", HF)
    assert torch.equal(models.weights(tmp_path / "back")[name], expected.bfloat16())


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Pack each row of ``numbers`` [r, c] into int32 words, from the lowest bit."""
    rows = []
    for row in numbers.tolist():
        stream = sum(int(number) << bits * place for place, number in enumerate(row))
        count = -(-len(row) * bits // 32)
        words = [(stream >> 32 * place) & 0xFFFFFFFF for place in range(count)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def of_awq(numbers: Tensor) -> Tensor:
    """Order each eight columns as AWQ does and pack them."""
    order = numbers.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    return packed(order.flatten(1), 4)


def pairs_of_fp4(codes: Tensor) -> Tensor:
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


class Sample:
    """Codes [o, i] of a matrix, zero points and scales [o, g], and its values."""

    def __init__(self, bits: int, group: int = 16, *, shuffled: bool = False) -> None:
        generator = torch.Generator().manual_seed(bits)
        self.bits, (rows, columns) = bits, (32, 64)
        groups = columns // group

        def some(*shape: int) -> Tensor:
            return torch.randint(0, 2**bits, shape, generator=generator)

        self.codes, self.zeros = some(rows, columns), some(rows, groups)
        self.scales = torch.rand(rows, groups, generator=generator) + 0.5
        order = torch.randperm(columns, generator=generator) if shuffled else torch.arange(columns)
        self.index = order // group
        zeros, scales = (each[:, self.index] for each in (self.zeros, self.scales))
        self.values = (self.codes - zeros) * scales

    def of_gptq(self, version: int) -> dict[str, Tensor]:
        zeros = packed(self.zeros.t(), self.bits)
        if version == 1:
            zeros = zeros - sum(1 << at for at in range(0, 32, self.bits))  # with borrows
        codes = packed(self.codes, self.bits).t().contiguous()
        return {
            "qweight": codes,
            "qzeros": zeros,
            "scales": self.scales.t().contiguous(),
            "g_idx": self.index.int(),
        }

    def of_compressed_tensors(self) -> dict[str, Tensor]:
        return {
            "weight_packed": packed(self.codes, self.bits),
            "weight_scale": self.scales,
            "weight_zero_point": packed(self.zeros.t(), self.bits).t().contiguous(),
            "weight_shape": torch.tensor(self.codes.shape),
            "weight_g_idx": self.index,
        }


def form(name: str) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Return quantization_config, the tensors of a layer, and its values."""
    four, three = Sample(4), Sample(3)
    shuffled = Sample(4, shuffled=True)
    wide = Sample(8, 64)
    fp4 = torch.tensor(FP4)[four.codes]
    small = four.scales.to(torch.float8_e4m3fn)
    signed = (wide.codes - 128).to(torch.int8)
    of_fp4 = fp4 * small.float()[:, four.index]
    e4m3 = (wide.codes / 16).to(torch.float8_e4m3fn)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    packed_4 = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    two = torch.tensor([2.0])
    forms: dict[str, tuple[dict[str, Any], dict[str, Tensor], Tensor]] = {
        "gptq": (gptq, four.of_gptq(1), four.values),
        "gptq by importance": (gptq, shuffled.of_gptq(1), shuffled.values),
        "gptq v2": ({**gptq, "checkpoint_format": "gptq_v2"}, four.of_gptq(2), four.values),
        "gptq v2, 3 bits": (
            {**gptq, "bits": 3, "checkpoint_format": "gptq_v2"},
            three.of_gptq(2),
            three.values,
        ),
        "awq": (
            {**gptq, "quant_method": "awq", "version": "gemm"},
            {
                "qweight": of_awq(four.codes.t()),
                "qzeros": of_awq(four.zeros.t()),
                "scales": four.scales.t().contiguous(),
            },
            four.values,
        ),
        "int4": (packed_4, four.of_compressed_tensors(), four.values),
        "int4 by importance": (packed_4, shuffled.of_compressed_tensors(), shuffled.values),
        "int3": (packed_4, three.of_compressed_tensors(), three.values),
        "int8": (
            packed_4,
            {"weight": signed, "weight_scale": wide.scales, "input_scale": two},
            signed * wide.scales,
        ),
        "fp8": (packed_4, {"weight": e4m3, "weight_scale": two}, e4m3.float() * 2),
        "nvfp4": (
            packed_4,
            {
                "weight_packed": pairs_of_fp4(four.codes),
                "weight_scale": small,
                "weight_global_scale": two,
            },
            of_fp4 / 2,
        ),
        "modelopt nvfp4": (
            {"quant_method": "modelopt"},
            {
                "weight": pairs_of_fp4(four.codes),
                "weight_scale": small,
                "weight_scale_2": two,
                "pre_quant_scale": four.scales.flatten()[:64],
            },
            of_fp4 * 2 * four.scales.flatten()[:64],
        ),
        "modelopt fp8 in squares": (
            {"quant_method": "modelopt", "weight_block_size": [16, 32]},
            {"weight": e4m3, "weight_scale": four.scales[:2, :2].reshape(2, 1, 2, 1)},
            e4m3.float() * four.scales[:2, :2].repeat_interleave(16, 0).repeat_interleave(32, 1),
        ),
    }
    return forms[name]


@pytest.mark.parametrize(
    "name",
    [
        *("gptq", "gptq by importance", "gptq v2", "gptq v2, 3 bits", "awq", "int4"),
        *("int4 by importance", "int3", "int8", "fp8", "nvfp4", "modelopt nvfp4"),
        "modelopt fp8 in squares",
    ],
)
def test_codes_of_every_form_are_read_as_their_values(name: str) -> None:
    settings, parts, expected = form(name)
    weights = {f"a.{own}": part for own, part in parts.items()}
    weights |= {"a.bias": torch.ones(3), "b.k_scale": torch.ones(1), "embed": torch.ones(2, 2)}
    found = plain_numbers(as_lazy(weights), {"quantization_config": settings})
    assert sorted(found) == ["a.bias", "a.weight", "embed"]
    assert found["a.weight"].shape == expected.shape
    torch.testing.assert_close(found["a.weight"].make(), expected)


@pytest.mark.feature(
    "Checkpoints: GPTQ, AWQ, compressed-tensors and ModelOpt folders are read from their codes"
)
def test_a_folder_of_modelopt_is_converted_without_its_quantization(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    models.write(theirs, "llama")
    held = models.weights(theirs)
    name = "model.layers.0.mlp.up_proj.weight"
    codes = held[name].to(torch.float8_e4m3fn)
    scales = {name.replace("weight", own): torch.tensor(0.5) for own in SCALES_OF_MODELOPT}
    rewritten(theirs, {**held, name: codes, **scales})
    (theirs / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    converted(theirs, tmp_path / "ours", OURS)
    converted(tmp_path / "ours", tmp_path / "back", HF)
    assert torch.equal(models.weights(tmp_path / "back")[name], codes.float() / 2)
    assert not (tmp_path / "back/hf_quant_config.json").exists()


SCALES_OF_MODELOPT = ("weight_scale", "input_scale")


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("gptq", {"bits": 5}, "has bits 5: 2 or 3 or 4 or 8 is needed"),
        ("awq", {"version": "gemv"}, "AWQ's version gemv: only gemm is read"),
        ("awq", {"group_size": "x"}, "has group_size x"),
        ("gptq by importance", {"g_idx": torch.full((64,), 4)}, "names groups beyond 0 to 3"),
        ("gptq", {"qzeros": None}, "have a.qweight and no qzeros"),
        ("int4", {"weight_shape": torch.tensor([32, 0])}, "a.weight_shape has 0 columns"),
        ("int4", {"weight_shape": torch.tensor([31, 64])}, "has 31 rows, a.weight_packed has 32"),
        ("awq", {"scales": torch.full((4, 32), torch.nan)}, "a.scales gives scales that are not f"),
        ("gptq", {"scales": torch.full((4, 32), torch.inf)}, "a.scales gives scales that are not"),
        ("fp8", {"weight_scale": torch.tensor([torch.nan])}, "a.weight_scale gives scales that"),
        ("nvfp4", {"weight_global_scale": torch.zeros(1)}, "a.weight_global_scale gives scales"),
        ("int4", {"weight_scale": torch.ones(32, 5)}, r"asks for torch.float32 \[1, 1\]"),
        ("nvfp4", {"weight_packed": None}, "no codes of a"),
        ("nvfp4", {"weight_global_scale": None}, "and no weight_global_scale"),
        ("fp8", {"weight": torch.ones(2, 2, dtype=torch.int16)}, "is torch.int16: no known codes"),
    ],
)
def test_codes_that_do_not_fit_are_named(name: str, change: dict[str, Any], sentence: str) -> None:
    settings, parts, _ = form(name)
    for own, value in change.items():
        if own in parts:
            parts[own] = value
        else:
            settings[own] = value
    weights = {f"a.{own}": part for own, part in parts.items() if part is not None}
    with pytest.raises(CheckpointError, match=sentence):
        made(weights, settings)


def made(weights: dict[str, Tensor], settings: dict[str, Any]) -> list[Tensor]:
    found = plain_numbers(as_lazy(weights), {"quantization_config": settings})
    return [tensor.make() for tensor in found.values()]


@pytest.mark.parametrize(
    ("kind", "shapes", "sentence"),
    [
        ("mxfp4", {"a_blocks.0": (2, 1, 16)}, r"have a_blocks\.0 and no scales"),
        (
            "mxfp4",
            {"a_blocks.0": (2, 3, 16), "a_scales.0": (2, 1)},
            r"a_scales.0 is torch.uint8 \[2, 1\]: .*asks for torch.uint8 \[2, 3\]",
        ),
        ("fp8", {"a.weight_scale_inv": (1, 1)}, "have a.weight_scale_inv and no codes of a,"),
        (
            "fp8",
            {"a.weight": (300, 128), "a.weight_scale_inv": (2, 1)},
            r"a.weight_scale_inv is torch.float32 \[2, 1\]: .*asks for torch.float32 \[3, 1\]",
        ),
        ("fp8", {"a.weight": (3, 3)}, "have a.weight and no weight_scale"),
    ],
)
def test_scales_that_do_not_fit_are_named(
    kind: str, shapes: dict[str, tuple[int, ...]], sentence: str
) -> None:
    dtypes = {"a.weight": torch.float8_e4m3fn, "a.weight_scale_inv": torch.float32}
    held = {k: torch.ones(s).to(dtypes.get(k, torch.uint8)) for k, s in shapes.items()}
    weights = {
        k: LazyTensor(k, t.dtype, tuple(t.shape), partial(held.get, k)) for k, t in held.items()
    }
    with pytest.raises(CheckpointError, match=sentence):
        plain_numbers(weights, {"quantization_config": {"quant_method": kind}})


@pytest.mark.feature(
    "Checkpoints: the MTP layers of DeepSeek V3 and GLM-4.5 from and to Hugging Face"
)
@pytest.mark.parametrize(
    ("case", "modeling", "name"),
    [("deepseek v3", deepseek, "DeepseekV3"), ("glm4 moe", glm, "Glm4Moe")],
)
def test_layers_that_predict_ahead_compute_what_transformers_does(
    case: str, modeling: Any, name: str, tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    main = models.write(theirs, case, num_hidden_layers=3, num_nextn_predict_layers=1)
    held = models.weights(theirs)
    # The layer of another model is what lies behind the last one.
    parts = (getattr(modeling, f"{name}{part}") for part in ("DecoderLayer", "RMSNorm"))
    layer = layers.MtpLayer(main.config, *parts, layer_idx=2)
    donor = models.make(case, num_hidden_layers=4).model.layers[3]
    layer.mtp_block.load_state_dict(donor.state_dict())
    torch.nn.init.normal_(layer.eh_proj.weight, std=0.2)
    models.write(tmp_path / "donor", case, num_hidden_layers=4)
    last = "model.layers.3."
    donated = models.weights(tmp_path / "donor")
    held |= {name: value for name, value in donated.items() if name.startswith(last)}
    for name in ("enorm", "hnorm", "eh_proj", "post_norm"):
        weight = getattr(layer, name).weight
        if "norm" in name:
            torch.nn.init.normal_(weight, mean=1.0, std=0.1)
        there = name.replace("post_norm", "shared_head.norm")
        held[f"{last}{there}.weight"] = weight.detach().clone()
    held[f"{last}embed_tokens.weight"] = held["model.embed_tokens.weight"].clone()
    held[f"{last}shared_head.head.weight"] = held["lm_head.weight"].clone()
    rewritten(theirs, held)
    converted(theirs, ours, OURS)
    stored = read_source(ConversionRequest(source=ours, target=ours, format=OURS))
    assert open_checkpoint(ours).asked["mtp_num_layers"] == 1
    model = our_model(run_config(open_checkpoint(ours).asked), stored.tensors, models.VOCABULARY)
    embedded, hidden = torch.randn(2, 2, 20, 32)
    mask = torch.full((20, 20), float("-inf")).triu(1)[None, None]
    positions = torch.arange(20)[None]
    with torch.no_grad():
        expected = layer(
            embedded,
            hidden,
            position_embeddings=main.model.rotary_emb(hidden, positions),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=None,
        )
        found, *_ = model.mtp.layers[0](
            None,
            None,
            hidden.transpose(0, 1),
            None,
            embedded=embedded.transpose(0, 1),
            rotary_pos_emb=model.rotary_pos_emb.table(20, 0, torch.float32),
        )
    torch.testing.assert_close(found.transpose(0, 1), expected, **tolerances.LOGITS)
    converted(ours, tmp_path / "back", HF)
    models.assert_same_weights(tmp_path / "back", theirs)
    found_config, config = (
        json.loads((f / "config.json").read_text()) for f in (tmp_path / "back", theirs)
    )
    assert found_config == config


@pytest.mark.feature(
    "Checkpoints: the MTP layers of Qwen3-Next, Qwen3.5 and Nemotron-3 from and to Hugging Face"
)
@pytest.mark.parametrize(
    "case", selection.first(2, ["qwen3.5 moe", NEMOTRON, "qwen3-next", "qwen3.5"])
)
def test_mtp_layers_that_transformers_drops_are_trained_and_written_back(
    case: str, tmp_path: Path
) -> None:
    """Judged by layers of transformers; published files have these names, its classes none."""
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    is_hybrid = case == NEMOTRON
    more: dict[str, Any] = {"layer_types": [*["linear_attention"] * 2, "full_attention"]}
    if is_hybrid:
        more = {"num_nextn_predict_layers": 1, "moe_latent_size": None}
    main = models.write(theirs, case, **more)
    donor = models.make(case, **more, **({"hybrid_override_pattern": "*E"} if is_hybrid else {}))
    for param in donor.parameters():
        param.data.add_(0.02 * torch.randn_like(param))
    donor.save_pretrained(tmp_path / "donor")
    blocks = donor.model.layers if is_hybrid else donor.model.layers[-1:]
    norm = type(blocks[-1].norm if is_hybrid else blocks[-1].input_layernorm)
    config = main.config
    epsilon = config.layer_norm_epsilon if is_hybrid else config.rms_norm_eps
    enorm, hnorm, post_norm = norms = [norm(32, epsilon) for _ in range(3)]
    eh_proj = torch.nn.Linear(64, 32, bias=False)
    for part in norms:
        part.weight.data.add_(0.1 * torch.randn(32))
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
    if is_hybrid:
        names = ("layers.0.enorm", "layers.0.hnorm", "layers.1.final_layernorm", "layers.0.eh_proj")
    held = {
        f"mtp.{name}.weight": part.weight.detach().clone()
        for name, part in zip(names, (*norms, eh_proj), strict=True)
    }
    for name, value in models.weights(tmp_path / "donor").items():
        if found := re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(.*)", name):
            number = int(found[1]) - (len(donor.model.layers) - len(blocks))
            if number >= 0:
                held[f"mtp.layers.{number}.{found[2]}"] = value
    rewritten(theirs, models.weights(theirs) | held)
    converted(theirs, ours, OURS)
    converted(ours, back, HF)
    models.assert_same_weights(back, theirs)
    config = json.loads((theirs / "config.json").read_text())
    assert json.loads((back / "config.json").read_text()) == config
    shutil.rmtree(ours / BESIDE)
    asked = open_checkpoint(ours).asked
    again = tmp_path / "again"  # with a config.json that is made from our arguments
    request = ConversionRequest(source=ours, target=again, format=HF, family=config["model_type"])
    convert(request, print)
    models.assert_same_weights(again, theirs)

    stored = read_source(ConversionRequest(source=ours, target=ours, format=OURS))
    model = our_model(run_config(asked), stored.tensors, models.VOCABULARY).train()
    text = models.prompts(20)
    tokens, labels = text[:, :-1], text[:, 1:]
    with torch.no_grad():
        hidden = main.model(tokens).last_hidden_state[:, :-1]
        embedded = main.get_input_embeddings()(tokens[:, 1:])
        positions = torch.arange(18)[None]
        given: dict[str, Any] = {"position_ids": positions}
        if not is_hybrid:
            given["position_embeddings"] = main.model.rotary_emb(hidden, positions)
        given["attention_mask"] = torch.full((18, 18), float("-inf")).triu(1)[None, None]
        state = eh_proj(torch.cat([enorm(embedded), hnorm(hidden)], -1))
        for block in blocks:
            state = block(state, **given)
        logits = main.lm_head(post_norm(state))
        expected = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    model(tokens, None, None, labels=labels).sum().backward()
    total, count = model.mtp.aux_losses.take()["mtp_1 loss"]
    torch.testing.assert_close(total / count, expected, **tolerances.LOGITS)
    assert all(p.grad is not None for name, p in model.named_parameters() if "mtp." in name)
