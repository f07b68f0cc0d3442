"""Model FLOPs against the reference's number, a hand count and torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.training.config.run import RunConfig
from megatron.training.estimates.flops import (
    causal_model_flops,
    image_flops,
    known_peak,
    mean_keys_per_query,
    num_floating_point_operations,
    tokens_of_a_sample,
)
from megatron.training.models.registry import build_model_stage, implementation_of
from tests.support.callback_calls import run_config
from tests.support.one_process import one_process_groups

# Counter of Megatron-LM core_v0.14 after 5 steps of 8 samples: 2 layers, hidden 32, 4 heads,
# sequence 64, padded vocabulary 512.
REFERENCE_FLOPS = 692060160.0

PLAIN = (
    "--transformer-impl local --attention-backend unfused --group-query-attention "
    "--num-query-groups 2 --swiglu"
)


def test_the_throughput_formula_gives_the_reference_number() -> None:
    assert num_floating_point_operations(run_config(), 5 * 8, 512) == REFERENCE_FLOPS


def test_a_sample_of_t5_has_the_tokens_of_both_halves() -> None:
    t5 = "--model-kind t5 --num-layers 2 --decoder-num-layers 4 --decoder-seq-length 32"
    assert tokens_of_a_sample(run_config(t5)) == 64 + 32
    assert tokens_of_a_sample(run_config()) == 64


def test_grouped_queries_wide_heads_and_gates_are_counted() -> None:
    config = run_config(
        "--group-query-attention --num-query-groups 2 --kv-channels 16 --swiglu "
        "--ffn-hidden-size 96 --num-layers 3"
    )
    per_token_and_layer = 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 96 + 2 * 64 * 32
    expected = 6 * 64 * (3 * per_token_and_layer + 32 * 512)
    assert num_floating_point_operations(config, 1, 512) == expected


def test_a_causal_query_meets_itself_and_what_stands_before_it() -> None:
    by_hand = sum(i + 1 for i in range(10)) / 10
    assert mean_keys_per_query(10) == by_hand
    assert mean_keys_per_query(10, window=3) == (1 + 2 + 8 * 3) / 10
    assert mean_keys_per_query(10, window=99) == by_hand


def test_layers_with_a_sliding_window_count_fewer_keys() -> None:
    whole = causal_model_flops(run_config(), 1, 512)
    windowed = causal_model_flops(
        run_config("--window-size 15,0 --window-attn-skip-freq 2"), 1, 512
    )
    per_key = whole.attention / 2 / mean_keys_per_query(64)
    expected = per_key * (mean_keys_per_query(64, window=16) + mean_keys_per_query(64))
    assert windowed.attention == pytest.approx(expected), "the second of two layers stays full"
    assert windowed.linear == whole.linear
    unlimited = causal_model_flops(run_config("--window-size=-1,0"), 1, 512)
    assert unlimited.attention == whole.attention


def test_windows_of_t5_are_counted_in_each_half() -> None:
    def attention(more: str) -> float:
        words = (
            f"--model-kind t5 --num-layers 2 --decoder-num-layers 4 --decoder-seq-length 32 {more}"
        )
        return causal_model_flops(run_config(words), 1, 512).attention

    e, d, channels = 64, 32, 32  # tokens of encoder and decoder
    cross, causal = 4 * d * e, mean_keys_per_query
    wide = 2 * e * e + 4 * d * causal(d) + cross
    assert attention("") == 6 * 2 * channels * wide
    near = causal(e, window=4) + causal(e, window=3) - 1  # 3 before, itself, 2 behind
    half = e * near + e * e + 2 * d * (causal(d, window=4) + causal(d)) + cross
    assert attention("--window-size 3,2 --window-attn-skip-freq 2") == 6 * 2 * channels * half


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, int]]:
    """What torch counts in a step: products with weights, and batches of products."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # the counter would set it

    def count(config: RunConfig, vocab: int, **batch: torch.Tensor) -> tuple[int, int]:
        sizes = {"vocab_size": vocab, "padded_vocab_size": vocab}
        model = build_model_stage(config, groups=one_process_groups(), **sizes)
        table = implementation_of(config).batch(config, 0, 1)
        with FlopCounterMode(display=False) as counter:
            out = implementation_of(config).apply(model, {**dict.fromkeys(table), **batch})
            losses = [out] if isinstance(out, torch.Tensor) else [x for x in out if x is not None]
            torch.stack([x.sum() for x in losses]).sum().backward()
        found = counter.get_flop_counts()["Global"].items()
        between = sum(n for op, n in found if "bmm" in str(op))
        return sum(n for _, n in found) - between, between

    return count


@pytest.mark.feature("Logging: tokens/s and MFU, from FLOPs that torch's counter confirms")
@pytest.mark.parametrize(
    "more",
    [
        "",
        "--mtp-num-layers 2 --mtp-use-repeated-layer --position-embedding-type rope",
        "--num-experts 4 --moe-latent-size 12 --moe-shared-expert-intermediate-size 8",
    ],
)
def test_torchs_counter_agrees_on_a_plain_gpt(more: str, counted) -> None:
    config = run_config(f"{PLAIN} --num-layers 3 --seq-length 48 {more}")
    vocab, batch, seq = 256, 2, 48
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    places = torch.arange(seq).expand(batch, seq)
    counted_linear, counted_attention = counted(
        config, vocab, tokens=tokens, labels=tokens, position_ids=places
    )
    flops = causal_model_flops(config, batch, vocab)
    assert flops.linear == pytest.approx(counted_linear, rel=0.01)
    # The plain path multiplies the whole square; the mask leaves (s + 1) / 2 keys of s.
    assert flops.attention == pytest.approx(counted_attention * (seq + 1) / 2 / seq, rel=0.01)
    assert flops.total == flops.linear + flops.attention


VLM = (
    f"--model-kind vlm --num-layers 2 --seq-length 15 --img-h 24 --img-w 36 --patch-dim 6 {PLAIN} "
    "--vision-num-layers 3 --vision-hidden-size 48 --vision-num-attention-heads 6"
)


@pytest.mark.feature("Logging: FLOPs of image encoders and of frozen parts")
@pytest.mark.parametrize(
    "more",
    [
        "",
        "--freeze-ViT",
        "--freeze-LM",
        "--freeze-ViT --freeze-LM",
        "--vision-model-type internvit --disable-vision-class-token --pixel-shuffle --img-w 24",
        "--vision-model-type siglip --vision-projection-type affine --freeze-ViT",
    ],
)
def test_torchs_counter_agrees_on_a_model_that_reads_images(more: str, counted) -> None:
    config = run_config(f"{VLM} {more}")
    batch = 2
    length = config.data.seq_length
    text = torch.ones(batch, 16, dtype=torch.long)
    tokens = text.clone()
    num_tiles = torch.zeros_like(text)
    tokens[:, 0] = -200
    num_tiles[:, 0] = 1
    linear, attention = counted(
        config,
        256,
        tokens=tokens,
        labels=text,
        position_ids=torch.arange(16).expand(batch, 16),
        num_tiles=num_tiles,
        images=torch.zeros(batch, 3, 24, config.vision.img_w),
    )
    flops = causal_model_flops(config, batch, 256)
    assert flops.linear == linear
    images = batch * image_flops(config).attention
    found = (attention - images) * (length + 1) / 2 / length  # under the causal mask
    assert flops.attention - images == pytest.approx(found)


@pytest.mark.feature("Logging: FLOPs of encoders of sound")
@pytest.mark.parametrize("more", ["", "--freeze-ViT", "--freeze-LM --freeze-ViT"])
def test_torchs_counter_agrees_on_a_model_of_images_and_sound(more: str, counted) -> None:
    config = run_config(
        f"--model-kind mimo --model-provider llava_avlm --num-layers 2 --seq-length 40 {PLAIN} "
        "--image-size 24 --patch-dim 6 --vision-num-layers 3 --vision-hidden-size 48 "
        f"--vision-num-attention-heads 6 --audio-seq-length 5 {more}"
    )
    batch = 2
    length = config.data.seq_length
    tokens = torch.ones(batch, length, dtype=torch.long)
    tokens[:, :16] = config.mimo.special_token_ids["images"]
    tokens[:, 20:25] = config.mimo.special_token_ids["audios"]
    linear, attention = counted(
        config,
        256,
        tokens=tokens,
        labels=torch.ones_like(tokens),
        position_ids=torch.arange(length).expand(batch, length),
        images=torch.zeros(batch, 3, 24, 24),
        audios=torch.zeros(batch, 80, 10),
    )
    flops = causal_model_flops(config, batch, 256)
    assert flops.linear == linear
    of_encoders = batch * image_flops(config).attention
    found = (attention - of_encoders) * (length + 1) / 2 / length  # under the causal mask
    assert flops.attention - of_encoders == pytest.approx(found)


def test_torchs_counter_agrees_on_a_model_that_reads_neighbors(counted) -> None:
    config = run_config(
        f"--model-kind retro --retro-add-retriever --retro-chunk-length 16 --num-layers 9 "
        f"--retro-encoder-layers 4 --retro-num-retrieved-chunks 1 {PLAIN}"
    )
    batch, seq, hidden = 2, 64, 32
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    linear, attention = counted(
        config,
        256,
        tokens=tokens,
        labels=tokens,
        position_ids=torch.arange(seq).expand(batch, seq),
        neighbor_tokens=torch.zeros(batch, 4, 2, 16, dtype=torch.long),
    )
    flops = causal_model_flops(config, batch, 256)
    assert flops.linear == linear
    hidden_keys = seq - (seq + 1) / 2  # of a causal query, which the plain path multiplies too
    assert flops.attention == attention - 6 * batch * 9 * 2 * hidden * seq * hidden_keys


def test_torchs_counter_and_a_hand_count_agree_on_a_hybrid(counted) -> None:
    config = run_config(
        "--model-kind mamba --transformer-impl local --attention-backend unfused --num-layers 5 "
        "--hybrid-override-pattern M*M-M --mamba-num-groups 2 --mamba-head-dim 16 "
        "--mamba-state-dim 8 --seq-length 48 --position-embedding-type none"
    )
    vocab, batch, seq, hidden, inner, state, groups, heads = 256, 2, 48, 32, 64, 8, 2, 4
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    places = torch.arange(seq).expand(batch, seq)
    linear, _ = counted(config, vocab, tokens=tokens, labels=tokens, position_ids=places)
    flops = causal_model_flops(config, batch, vocab)
    mixer = hidden * (2 * inner + 2 * groups * state + heads) + hidden * inner
    attention, mlp = 4 * hidden * hidden, 8 * hidden * hidden
    by_hand = 6 * batch * seq * (3 * mixer + attention + mlp + hidden * vocab)
    assert flops.linear == by_hand == pytest.approx(linear, rel=0.01)
    convolution, scan = 4 * (inner + 2 * groups * state), 3 * inner * state
    scores = 2 * hidden * mean_keys_per_query(seq)
    assert flops.attention == 6 * batch * seq * (3 * (convolution + scan) + scores)
    assert num_floating_point_operations(config, batch, vocab) == flops.total + (
        6 * batch * seq * 2 * hidden * (seq / 2 - mean_keys_per_query(seq))
    )


def test_torchs_counter_and_a_hand_count_agree_on_linear_attention(counted) -> None:
    config = run_config(
        "--transformer-impl local --attention-backend unfused --num-layers 4 --seq-length 48 "
        "--experimental-attention-variant gated_delta_net --linear-attention-freq [1,1,0,1] "
        "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 6 "
        "--linear-value-head-dim 8 --attention-output-gate --position-embedding-type none"
    )
    vocab, batch, seq, hidden, keys, values = 256, 2, 48, 32, 12, 32
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    places = torch.arange(seq).expand(batch, seq)
    linear, _ = counted(config, vocab, tokens=tokens, labels=tokens, position_ids=places)
    flops = causal_model_flops(config, batch, vocab)
    delta_net = hidden * (2 * keys + 2 * values + 2 * 4) + hidden * values
    attention, mlp = 5 * hidden * hidden, 8 * hidden * hidden
    by_hand = 6 * batch * seq * (3 * delta_net + attention + 4 * mlp + hidden * vocab)
    assert flops.linear == by_hand == pytest.approx(linear, rel=0.01)
    convolution, rule = 4 * (2 * keys + values), 4 * values * 6
    scores = 2 * hidden * mean_keys_per_query(seq)
    assert flops.attention == 6 * batch * seq * (3 * (convolution + rule) + scores)


@pytest.mark.parametrize(("coefficient", "passes"), [(0, 1), (0.1, 2)])
def test_torchs_counter_and_a_hand_count_agree_on_sparse_attention(
    counted, coefficient: float, passes: int
) -> None:
    config = run_config(
        "--transformer-impl local --attention-backend unfused --num-layers 2 --seq-length 48 "
        "--multi-latent-attention --q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 6 --v-head-dim 6 "
        "--qk-pos-emb-head-dim 2 --position-embedding-type rope --dsa-indexer-topk 16 "
        "--experimental-attention-variant dsa --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 4 "
        f"--dsa-indexer-loss-coeff {coefficient}"
    )
    vocab, batch, seq, hidden, heads = 256, 2, 48, 32, 4
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    places = torch.arange(seq).expand(batch, seq)
    linear, _ = counted(config, vocab, tokens=tokens, labels=tokens, position_ids=places)
    flops = causal_model_flops(config, batch, vocab)
    queries, keys = hidden * 8 + 8 * heads * 8, hidden * (8 + 2) + 8 * heads * (6 + 6)
    attention, mlp = queries + keys + heads * 6 * hidden, 8 * hidden * hidden
    indexer = 8 * 3 * 4 + hidden * 4 + hidden * 3
    by_hand = 6 * batch * seq * (2 * (attention + mlp) + hidden * vocab)
    by_hand += 2 * passes * batch * seq * 2 * indexer
    assert flops.linear == pytest.approx(by_hand) == pytest.approx(linear, rel=0.01)
    scores = 3 * (4 + 1) * mean_keys_per_query(seq) * (3 if coefficient else 1) / 3
    attended = 2 * heads * (8 + 6) / 2 * mean_keys_per_query(seq, 16)
    assert flops.attention == pytest.approx(6 * batch * seq * 2 * (scores + attended))


def test_torchs_counter_agrees_on_several_residual_streams(counted) -> None:
    vocab, batch, seq, hidden, streams = 256, 2, 48, 32, 3
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    places = torch.arange(seq).expand(batch, seq)
    found = []
    for more in ("", f"--enable-mhc-connections --mhc-num-residual-streams {streams}"):
        config = run_config(f"{PLAIN} --num-layers 3 --seq-length {seq} {more}")
        by_torch = counted(config, vocab, tokens=tokens, labels=tokens, position_ids=places)
        flops = causal_model_flops(config, batch, vocab)
        found.append((flops.linear - by_torch[0], flops.attention - by_torch[1]))
    last_read = 6 * batch * seq * streams * hidden  # the only product that is not counted
    assert found[1] == (found[0][0], found[0][1] - last_read)


def test_a_gpu_is_known_by_a_part_of_its_name() -> None:
    assert known_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert known_peak("NVIDIA H200") == known_peak("NVIDIA H100 80GB HBM3") == 989.4e12
    assert known_peak("NVIDIA H100 PCIe") == 756e12
    assert known_peak("Some GPU of tomorrow") is None


def test_torchs_counter_agrees_on_an_image_classifier(counted) -> None:
    config = run_config(f"--model-kind vit --img-h 24 --img-w 36 --patch-dim 6 {PLAIN}")
    batch = 2
    linear, attention = counted(
        config,
        256,
        images=torch.zeros(batch, 3, 24, 36),
        labels=torch.zeros(batch, dtype=torch.long),
        loss_mask=torch.ones(batch),
    )
    flops = causal_model_flops(config, batch, 256)
    assert flops.linear == linear
    assert flops.attention == attention
