"""The memory estimate: its parameter count is the model's, its lines are the reference's."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.fusions import kernels
from megatron.training.arguments.flat_values import flat_values
from megatron.training.estimates.parameters import encoder_parameters, projector_parameters
from megatron.training.estimates.theoretical_memory import (
    activation_bytes,
    count_parameters,
    memory_lines,
    print_memory,
    weight_and_optimizer_bytes,
)
from megatron.training.models.gpt import build_gpt_model
from megatron.training.theoretical_memory_usage import report_theoretical_memory
from tests.support.callback_calls import run_config
from tests.support.one_process import one_process_groups

MODELS = {
    "gpt2": "",
    "llama": "--swiglu --disable-bias-linear --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --position-embedding-type rope "
    "--group-query-attention --num-query-groups 2 --kv-channels 16 --ffn-hidden-size 88",
    "qwen2": "--swiglu --disable-bias-linear --add-qkv-bias --normalization RMSNorm "
    "--position-embedding-type rope",
}


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS.keys())
def test_the_count_is_that_of_the_model(flags: str) -> None:
    config = run_config(flags)
    gpt = build_gpt_model(
        config, vocab_size=512, padded_vocab_size=512, groups=one_process_groups()
    )
    positions = [p for name, p in gpt.named_parameters() if "position_embeddings" in name]
    expected = sum(p.numel() for p in gpt.parameters()) - sum(p.numel() for p in positions)
    count = count_parameters(config, 512)
    assert count.layers + count.embeddings == expected
    assert count.most_loaded_shard == expected, "one rank holds all"


def test_the_distributed_optimizer_divides_its_share() -> None:
    config = run_config("", world_size=4)
    whole = weight_and_optimizer_bytes(config, 512)
    sharded = replace(config.optimizer, use_distributed_optimizer=True)
    shared = weight_and_optimizer_bytes(replace(config, optimizer=sharded), 512)
    assert shared / whole == (6 + 12 / 4) / 18


VLM = "--model-kind vlm --img-h 24 --img-w 24 --patch-dim 6 --vision-num-layers 3"


@pytest.mark.feature("Logging: theoretical memory counts image encoders and frozen parts")
def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    def size(flags: str) -> float:
        return weight_and_optimizer_bytes(run_config(f"{VLM} {flags}"), 512)

    run = run_config(VLM)
    encoder = encoder_parameters(run)
    projector = projector_parameters(run)
    language = count_parameters(run, 512).most_loaded_shard - encoder - projector
    assert size("") == 18 * (language + encoder + projector)
    assert size("--freeze-ViT") == size("") - 16 * encoder
    assert size("--freeze-LM") == size("") - 16 * language
    assert size("--freeze-LM --freeze-ViT") == 2 * (language + encoder) + 18 * projector


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_available", lambda name, *tensors: False)


@pytest.mark.usefixtures("no_kernels")
def test_fewer_bits_are_counted() -> None:
    words = "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16"
    whole, config = run_config("--bf16"), run_config(words)
    halved = run_config(f"{words} --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8")
    bytes_of = [weight_and_optimizer_bytes(c, 512) for c in (whole, config, halved)]
    assert [size / bytes_of[0] * 18 for size in bytes_of] == [18, 14, 9]


@pytest.mark.parametrize(
    ("flags", "num_bytes"),
    [
        ("--bf16", 16),
        ("--bf16 --optimizer sgd", 18),
        ("--fp16 --initial-loss-scale 4", 18),
        ("--fp16 --initial-loss-scale 4 --use-precision-aware-optimizer", 18),
    ],
)
def test_a_remainder_of_16_bits_is_counted_where_it_is_stored(flags: str, num_bytes: int) -> None:
    """As by the optimizer: with a fused kernel for Adam, and weights that are the upper half."""
    config = run_config(flags)
    params = count_parameters(config, 512).most_loaded_shard
    with device.simulate_device("cuda"):
        assert weight_and_optimizer_bytes(config, 512) / params == num_bytes


def test_selective_recomputation_keeps_34_bytes_per_token_width_and_layer() -> None:
    config = run_config(
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity selective", 2
    )
    tokens, hidden = 2 * 64, 32
    layers = tokens * hidden * 2 * 34
    rest = 8 * tokens + tokens * hidden + 4 * (tokens * hidden + tokens * 512)
    assert activation_bytes(config, 512, num_microbatches=4) == (layers + rest) / 2
    divided = replace(config, model=replace(config.model, context_parallel_size=2))
    assert activation_bytes(divided, 512, num_microbatches=4) == (layers + rest) / 4
    (line,) = memory_lines(config, 512, num_microbatches=4)
    assert line == (
        "Theoretical memory footprints: weight and optimizer=0.36 MB, activation=0.27 MB, "
        "total=0.63 MB"
    )


def test_the_report_says_how_many_parameters_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_memory(run_config("--hidden-size 1024"), 512, verbose=True)
    assert capsys.readouterr().out == (
        "Number of parameters in transformer layers in billions:  0.03\n"
        "Number of parameters in embedding layers in billions: 0.00\n"
        "Total number of parameters in billions: 0.03\n"
        "Number of parameters in most loaded shard in billions: 0.0257\n"
        "Theoretical memory footprints: weight and optimizer=441.49 MB\n"
    )


def test_scripts_hand_over_their_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    config = run_config("--hidden-size 1024 --padded-vocab-size 512")
    print_memory(config, 512, verbose=True)
    expected = capsys.readouterr().out
    report_theoretical_memory(Namespace(**flat_values(config)), verbose=True)
    assert capsys.readouterr().out == expected


def test_without_a_vocabulary_scripts_hear_what_to_do() -> None:
    args = Namespace(**flat_values(run_config("")))
    with pytest.raises(ConfigError, match="needs the padded vocabulary size: give --padded-vocab"):
        report_theoretical_memory(args)
