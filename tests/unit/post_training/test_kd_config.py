"""The file of --export-kd-cfg: what it sets, and the message for each mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError
from megatron.post_training.distillation.objective import KDConfig, LayerPair, read_kd_config

pytest.importorskip("yaml")

FILE = """
logit_layers: ["output_layer", "output_layer"]
intermediate_layer_pairs:
  - ["decoder.layers.3", "decoder.layers.7", "mse"]
  - ["decoder.final_layernorm", "decoder.final_layernorm"]
skip_lm_loss: false
kd_loss_scale: 10.0
logit_kl_temperature: 2
"""


def test_a_file_of_megatron_lm_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kd.yaml"
    path.write_text(FILE)
    assert read_kd_config(str(path)) == KDConfig(
        intermediate_layer_pairs=(LayerPair(3, 7, "mse"), LayerPair(None, None)),
        skip_lm_loss=False,
        kd_loss_scale=10.0,
        logit_kl_temperature=2.0,
    )
    assert read_kd_config(None) == KDConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "a mapping of settings is needed"),
        ("kd_scale: 1", "unknown setting 'kd_scale'; use intermediate_layer_pairs, kd_loss_scale"),
        ("skip_lm_loss: 1", "skip_lm_loss 1: write true or false"),
        ("kd_loss_scale: .inf", "kd_loss_scale inf: a finite number above 0 is needed"),
        ("logit_kl_temperature: 0", "logit_kl_temperature 0: a finite number above 0"),
        ("logit_layers: [a, b]", "the logits of both models are the outputs of output_layer"),
        ("intermediate_layer_pairs: 3", "give a list of pairs"),
        ("intermediate_layer_pairs: [[a]]", "write [student layer, teacher layer]"),
        (
            "intermediate_layer_pairs: [[decoder.layers.0, decoder.layers.0, [mse]]]",
            "write [student layer, teacher layer]",
        ),
        (
            "intermediate_layer_pairs: [[decoder.layers.0.mlp, decoder.layers.0]]",
            "a layer is decoder.layers.N, its output, or decoder.final_layernorm",
        ),
        (
            "intermediate_layer_pairs: [[decoder.layers.0, decoder.layers.0, l1]]",
            "the loss cosine (default) or mse as third value",
        ),
        ("a: [", "not YAML"),
    ],
)
def test_a_mistake_is_one_message(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "kd.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        read_kd_config(str(path))
    assert str(caught.value).startswith(f"--export-kd-cfg {path}: ")
