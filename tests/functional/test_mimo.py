"""Runs of examples/mimo/train.py: in one process and in layouts, with and without images."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing import CheckpointReader
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference import LLM, PromptWithImages
from megatron.inference.engine_flags import GenerationLayout
from megatron.training.conversion.convert import HF, ConversionRequest, convert
from tests.support import selection, tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, refusal, run_gpt, run_gpt_in_virtual_ranks

FLAGS = (
    "--model-kind mimo --model-provider llava_avlm --audio-seq-length 5 --vision-num-layers 1 "
    "--seq-length 40 --max-position-embeddings 40 --image-size 24 --patch-dim 6 --train-iters 4 "
    "--vision-hidden-size 48 --vision-num-attention-heads 4 --seed 5"
).split()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of a run in one process."""
    return run_gpt(tmp_path_factory.mktemp("whole"), *FLAGS)


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for key in ("lm loss", "grad-norm"):
        mine = torch.tensor(losses(found, key))
        one = torch.tensor(losses(wanted, key))
        assert len(one)
        torch.testing.assert_close(mine, one, **tolerances.LAYOUT_LOSS)


@pytest.mark.feature("MiMo: images and sound train in every layout with one process's losses")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    selection.first(
        2,
        [
            (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
            (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
            (4, "--tensor-model-parallel-size 2 --encoder-tp 1 --pipeline-model-parallel-size 2"),
            (2, "--tensor-model-parallel-size 2"),
            (2, "--pipeline-model-parallel-size 2"),
            (4, "--tensor-model-parallel-size 4 --sequence-parallel --encoder-tp 2"),
        ],
    ),
)
def test_every_layout_has_the_losses_of_one_process(
    tmp_path: Path, whole: list[dict[str, Any]], ranks: int, layout: str
) -> None:
    found, _ = run_gpt_in_virtual_ranks(tmp_path, *FLAGS, *layout.split(), ranks=ranks)
    same(found, whole)


@pytest.mark.feature("MiMo: a run goes on exactly in another layout")
def test_a_run_goes_on_in_another_layout(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    saved = str(tmp_path / "ck")
    wide = "--tensor-model-parallel-size 4 --encoder-tp 2 --use-distributed-optimizer "
    wide += "--exit-interval 2 --save"
    first = run_gpt(tmp_path / "a", *FLAGS, *wide.split(), saved, world_size=4)
    stages = "--pipeline-model-parallel-size 2 --load".split()
    same(first + run_gpt(tmp_path / "b", *FLAGS, *stages, saved, world_size=2), whole)


def test_a_run_goes_on_bitwise_in_the_same_layout(
    tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    saved = str(tmp_path / "ck")
    first = run_gpt(tmp_path / "a", *FLAGS, "--exit-interval", "2", "--save", saved)
    rest = run_gpt(tmp_path / "b", *FLAGS, "--load", saved)
    assert losses(first) + losses(rest) == losses(whole)


@pytest.mark.parametrize(
    "provider", ["mock", "llava_vlm", "video_llava_vlm --num-frames 2", "llava_avlm"]
)
def test_every_provider_trains(tmp_path: Path, provider: str) -> None:
    found = losses(run_gpt(tmp_path, *FLAGS, "--lr", "1e-2", "--model-provider", *provider.split()))
    assert found[-1] < found[0]


def test_frozen_parts_do_not_change(tmp_path: Path) -> None:
    saved = tmp_path / "ck"
    given = ["--freeze-LM", "--freeze-ViT", "--save", str(saved), "--save-interval", "1"]
    run_gpt(tmp_path, *FLAGS, *given)
    with (
        CheckpointReader(saved / "iter_0000001") as first,
        CheckpointReader(saved / "iter_0000004") as last,
    ):
        names = [n for n in first.tensors if n.startswith(("language", "modality"))]
        for name in names:
            is_frozen = "_projections." not in name
            assert torch.equal(first.read(name), last.read(name)) == is_frozen, name


@pytest.mark.feature("MiMo: image-text shards train; rows without images run the encoders too")
def test_shards_train_with_rows_that_have_no_image(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("transformers")
    from examples.multimodal.quickstart import draw_samples

    draw_samples.write_shard(tmp_path / "a.tar", 24, seed=1)
    write_texts(tmp_path / "b.tar", 24)
    draw_samples.write_tokenizer(tmp_path / "tokenizer")
    flags = [f for f in (*TINY, *FLAGS) if f not in ("--mock-data", "--vocab-size", "100")]
    base = [*flags, "--seq-length", "48", "--max-position-embeddings", "48"]
    base += ["--micro-batch-size", "1", "--dataset-provider", "llava_vlm"]
    base += ["--data-path", "1", str(tmp_path / "a.tar"), "1", str(tmp_path / "b.tar")]
    base += ["--split", "1,0,0", "--eval-iters", "0", "--data-cache-path", str(tmp_path / "cache")]
    base += ["--tokenizer-type", "MultimodalTokenizer", "--tokenizer-prompt-format", "qwen2p5"]
    base += ["--tokenizer-model", str(tmp_path / "tokenizer")]
    base += ["--no-gradient-accumulation-fusion"]
    one = run_gpt(tmp_path / "one", base=base)
    for sharded in ("--overlap-grad-reduce --use-distributed-optimizer", "--use-torch-fsdp2"):
        found = run_gpt(tmp_path / sharded, *sharded.split(), base=base, world_size=2)
        same(found, one)


@pytest.mark.feature("MiMo: --language-model-checkpoint reads the weights of a GPT")
def test_the_language_model_starts_from_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    text = ["--seq-length", "40", "--max-position-embeddings", "40", "--train-iters", "1"]
    run_gpt(tmp_path / "gpt", *text, "--save", str(tmp_path / "gpt"), "--seed", "9")
    given = ["--language-model-checkpoint", str(tmp_path / "gpt"), "--save", str(tmp_path / "ck")]
    given += ["--freeze-LM", "--train-iters", "1", "--tensor-model-parallel-size", "2"]
    given += ["--pipeline-model-parallel-size", "2"]
    run_gpt(tmp_path / "b", *FLAGS, *given, world_size=4)
    with (
        CheckpointReader(tmp_path / "gpt/iter_0000001") as theirs,
        CheckpointReader(tmp_path / "ck/iter_0000001") as mine,
    ):
        names = [name for name in theirs.tensors if name.startswith(("embed", "decoder"))]
        for name in names:
            assert torch.equal(mine.read(f"language_model.{name}"), theirs.read(name)), name
    other = [*TINY, *FLAGS, *given[:2], "--normalization", "RMSNorm"]
    (said,) = run_ranks(refusal, 1, other)
    assert "normalization: LayerNorm in the checkpoint, RMSNorm in this run" in said


@pytest.mark.feature("MiMo: --audio-encoder-model reads the size and weights of Whisper's encoder")
def test_the_encoder_of_sound_starts_from_a_hugging_face_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    small = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 40}
    config = transformers.WhisperConfig(
        **small, encoder_attention_heads=2, num_mel_bins=6, max_source_positions=8
    )
    hf = transformers.WhisperModel(config)
    hf.save_pretrained(tmp_path / "hf")
    given = ["--audio-encoder-model", str(tmp_path / "hf"), "--freeze-ViT", "--train-iters", "1"]
    given += ["--tensor-model-parallel-size", "2", "--save", str(tmp_path / "ck")]
    run_gpt(tmp_path, *FLAGS, *given, world_size=2)
    tensors = dict(hf.state_dict())
    first = "decoder.layers.0.mlp.linear_fc1.weight"
    with CheckpointReader(tmp_path / "ck/iter_0000001") as mine:
        prefix = "modality_submodules.audios.encoders.whisper_encoder."
        for ours, theirs in (("conv2.weight", "conv2.weight"), (first, "layers.0.fc1.weight")):
            assert torch.equal(mine.read(prefix + ours), tensors[f"encoder.{theirs}"]), ours
    (said,) = run_ranks(refusal, 1, [*TINY, *FLAGS, "--audio-encoder-model", str(tmp_path)])
    assert "it has no config.json; give the folder of a Whisper model" in said


def written(rank: int, world_size: int, load: str, tp: int) -> list[list[int]]:
    llm = LLM.load(load, device_kind="cpu", layout=GenerationLayout(tensor=tp))
    params = SamplingParams(num_tokens_to_generate=6, top_k=1, ignore_eos=True)
    return [[t.token for t in answer.tokens] for answer in llm.generate(prompts(), params)]


def prompts() -> list[Any]:
    image = pytest.importorskip("PIL.Image").new("RGB", (24, 24), (200, 30, 90))
    return ["5 6 7 8", PromptWithImages("9 <image> 5 6", [image])]


def by_logits(rank: int, world_size: int, load: str) -> list[list[int]]:
    """Continue each prompt by the most likely token of a forward pass over all of it."""
    llm = LLM.load(load, device_kind="cpu")
    encode = llm.engine.model.encode_images
    assert encode is not None
    assert llm._image_prompts is not None
    (model,) = encode.args  # type: ignore[attr-defined]
    found = []
    for prompt in prompts():
        of_image = []
        inputs = {}
        if isinstance(prompt, str):
            ids = llm.tokenizer.tokenize(prompt)
        else:
            ids, of_image = llm._image_prompts.prompt(prompt.text, prompt.images)
            ids = [min(i, 32000) for i in ids]
            inputs = {"images": {"clip_encoder": {"x": torch.from_numpy(of_image[0].pixels)}}}
        for _ in range(6):
            row = torch.tensor([ids])
            positions = torch.arange(len(ids))[None]
            with torch.no_grad():
                logits, _ = model(row, positions, modality_inputs=inputs)
            ids = [*ids, int(logits[0, -1, : llm.engine.model.vocab_size].argmax())]
        found.append(ids[-6:])
    return found


@pytest.mark.feature("MiMo: models write text about images")
def test_models_write_text_about_images(tmp_path: Path) -> None:
    saved = str(tmp_path / "ck")
    given = "--model-provider llava_vlm --tensor-model-parallel-size 2 --encoder-tp 2 --lr 1e-2"
    run_gpt(tmp_path, *FLAGS, *given.split(), "--save", saved, world_size=2)
    (wanted,) = run_ranks(by_logits, 1, saved)
    assert run_ranks(written, 1, saved, 1)[0] == wanted
    assert run_ranks(written, 2, saved, 2)[0] == wanted
    with pytest.raises(CheckpointError, match="has no form at Hugging Face"):
        convert(ConversionRequest(source=tmp_path / "ck", target=tmp_path / "hf", format=HF))


def write_texts(path: Path, count: int) -> None:
    turns = [{"from": "human", "value": "What is the digit?"}, {"from": "gpt", "value": "a digit"}]
    record = json.dumps({"conversations": turns}).encode()
    with tarfile.open(path, "w") as shard:
        for number in range(count):
            entry = tarfile.TarInfo(f"{number:06d}.json")
            entry.size = len(record)
            shard.addfile(entry, BytesIO(record))


def test_all_conflicts_are_reported_at_once() -> None:
    wrong = "--seq-length 20 --image-seq-length 9 --image-token-id 32002 --encoder-tp 4"
    wrong += " --image-grid-pinpoints 24 48"
    wrong += " --hf-assign-unused-tokens <smell>,7"
    (said,) = run_ranks(refusal, 1, [*TINY, *FLAGS, *wrong.split()])
    for text in (
        "--total-seq-length 20 has no place for text beside the embeddings",
        "--image-seq-length 9: the encoder gives 16 embeddings of an image",
        "--image-token-id 32002 is the placeholder of sound too",
        "--image-grid-pinpoints: a MiMo model has one placeholder for each embedding of a tile",
        "--encoder-tp 4 does not divide --tensor-model-parallel-size 1",
        "--hf-assign-unused-tokens <smell>,7",
    ):
        assert text in said, said
