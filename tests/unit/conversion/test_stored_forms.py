"""Weights in few bits, and layers that predict further ahead: what Hugging Face folders hold."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.conversion.convert import (
    HF,
    ConversionRequest,
    convert,
    read_source,
    run_config,
)
from megatron.training.conversion.lazy import plain_numbers
from megatron.training.conversion.verify import our_model
from tests.support import hugging_face_models as models
from tests.support import tolerances

layers = pytest.importorskip("transformers.modeling_layers")
deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")

OURS = "safetensors_dist"
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


@pytest.mark.parametrize(
    ("kind", "shapes", "sentence"),
    [
        ("mxfp4", {"a_blocks.0": (2, 1, 16)}, r"have a_blocks\.0 and no a_scales\.0"),
        (
            "mxfp4",
            {"a_blocks.0": (2, 3, 16), "a_scales.0": (2, 1)},
            r"a_scales.0 is torch.uint8 \[2, 1\]: .*asks for torch.uint8 \[2, 3\]",
        ),
        ("fp8", {"a_scale_inv": (1, 1)}, "have a_scale_inv and no a,"),
        (
            "fp8",
            {"a": (300, 128), "a_scale_inv": (2, 1)},
            r"a_scale_inv is torch.float32 \[2, 1\]: .*asks for torch.float32 \[3, 1\]",
        ),
        ("fp8", {"a": (3, 3)}, "have a and no a_scale_inv"),
        (
            "fp8",
            {"b": (3, 3), "b_scale_inv": (1, 1)},
            r"b is torch.uint8 \[3, 3\]: .*asks for torch.float8_e4m3fn",
        ),
    ],
)
def test_scales_that_do_not_fit_are_named(
    kind: str, shapes: dict[str, tuple[int, ...]], sentence: str
) -> None:
    dtypes = {"a": torch.float8_e4m3fn, "a_scale_inv": torch.float32}
    held = {k: torch.ones(s).to(dtypes.get(k, torch.uint8)) for k, s in shapes.items()}
    weights = {
        k: LazyTensor(k, t.dtype, tuple(t.shape), partial(held.get, k)) for k, t in held.items()
    }
    with pytest.raises(CheckpointError, match=sentence):
        plain_numbers(weights, {"quantization_config": {"quant_method": kind}})


@pytest.mark.feature("Checkpoints: DeepSeek V3's layers for tokens further ahead come and go")
def test_layers_that_predict_ahead_compute_what_transformers_does(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    main = models.write(theirs, "deepseek v3", num_nextn_predict_layers=1)
    held = models.weights(theirs)
    # The layer of another model is what lies behind the last one.
    layer = layers.MtpLayer(
        main.config, deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RMSNorm, layer_idx=2
    )
    donor = models.make("deepseek v3", num_hidden_layers=4).model.layers[3]
    layer.mtp_block.load_state_dict(donor.state_dict())
    torch.nn.init.normal_(layer.eh_proj.weight, std=0.2)
    models.write(tmp_path / "donor", "deepseek v3", num_hidden_layers=4)
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
