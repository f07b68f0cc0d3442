"""Runs of pretrain_vlm.py: in one process and in layouts, into other layouts, with frozen parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing import CheckpointReader
from megatron.training.conversion.convert import ConversionRequest, convert
from pretrain_vlm import weighted_loss
from tests.support import selection, tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, refusal, run_gpt, run_gpt_in_virtual_ranks
from tests.unit.models.test_mrope import qwen

FLAGS = (
    "--model-kind vlm --vision-num-layers 1 --seq-length 20 --img-h 24 --img-w 24 --patch-dim 6 "
    "--train-iters 4 --vision-hidden-size 48 --vision-num-attention-heads 6 --seed 5"
).split()

IN_ROWS = "--image-grid-pinpoints 24 48 48 24 48 48 --disable-vision-class-token"
ANY_SIZE = "--vision-model-type qwen2_vl"  # 24 x 24 pixels are 2 x 2 blocks of patches
MROPE = "--position-embedding-type mrope --mrope-section 1 1 2"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.1 --disable-bias-linear"
).split()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run in one process."""
    return losses(run_gpt(tmp_path_factory.mktemp("whole"), *FLAGS))


def same(found: list[float], wanted: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), **tolerances.LAYOUT_LOSS)


@pytest.mark.feature("Vision: pretrain_vlm.py has the losses of one process in every layout")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    selection.first(
        2,
        [
            (4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
            (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
            (2, "--tensor-model-parallel-size 2"),
            (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
        ],
    ),
)
def test_every_layout_has_the_losses_of_one_process(
    tmp_path: Path, whole: list[float], ranks: int, layout: str
) -> None:
    found, _ = run_gpt_in_virtual_ranks(tmp_path, *FLAGS, *layout.split(), ranks=ranks)
    same(losses(found), whole)


@pytest.mark.feature("Vision: pretrain_vlm.py trains Qwen2-VL, with M-RoPE, in every layout")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    selection.first(
        1,
        [
            (4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer"),
            (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
        ],
    ),
)
def test_images_of_any_size_have_the_losses_of_one_process(
    tmp_path: Path, ranks: int, layout: str
) -> None:
    given = [*FLAGS, *ANY_SIZE.split(), *MROPE.split()]
    wanted = losses(run_gpt(tmp_path / "one", *given))
    same(losses(run_gpt(tmp_path / "more", *given, *layout.split(), world_size=ranks)), wanted)


GEMMA3 = (
    "--vision-model-type gemma3 --pooled-image-embeddings 4 --vision-projection-type affine "
    "--position-embedding-type rope --window-size 6,0 --window-attn-skip-freq [1,0]"
)


QWEN3_VL = (
    "--vision-model-type qwen3_vl --vision-num-position-embeddings 16 --mrope-interleaved "
    f"{MROPE} --vision-num-layers 2"
)
ADDED = f"{QWEN3_VL} --deepstack-visual-indexes 0 1 --num-layers 4 --recompute-vision"
LINEAR = (
    f"{QWEN3_VL} --experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 6 "
    "--linear-value-head-dim 4 --attention-output-gate"
)
PIXTRAL = "--vision-model-type pixtral --position-embedding-type rope"
NARROW = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"


@pytest.mark.feature(
    "Vision: pretrain_vlm.py trains Gemma-3, Qwen3-VL, Qwen3.5 and Mistral 3 in every layout"
)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    selection.first(
        1,
        [
            (4, NARROW),
            (4, "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
        ],
    ),
)
@pytest.mark.parametrize("kind", [GEMMA3, ADDED, LINEAR, PIXTRAL])
def test_families_of_images_have_the_losses_of_one_process(
    tmp_path: Path, kind: str, ranks: int, layout: str
) -> None:
    given = [*FLAGS, *kind.split(), "--train-iters", "2"]
    wanted = losses(run_gpt(tmp_path / "one", *given))
    found, _ = run_gpt_in_virtual_ranks(tmp_path / "more", *given, *layout.split(), ranks=ranks)
    same(losses(found), wanted)


@pytest.mark.feature("Vision: pretrain_vlm.py trains LLaVA-NeXT, whose tiles lie in rows")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    selection.first(
        1,
        [
            (4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer"),
            (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
        ],
    ),
)
def test_tiles_in_rows_have_the_losses_of_one_process(
    tmp_path: Path, ranks: int, layout: str
) -> None:
    given = [*FLAGS, *IN_ROWS.split()]
    wanted = losses(run_gpt(tmp_path / "one", *given))
    same(losses(run_gpt(tmp_path / "more", *given, *layout.split(), world_size=ranks)), wanted)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Metrics of a run with experts in one process, where no row has padding."""
    return run_gpt(tmp_path_factory.mktemp("experts"), *FLAGS, *EXPERTS)


@pytest.mark.feature("Vision: padding visits no expert of a vision-language model")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    selection.first(
        2,
        [
            (2, "--pipeline-model-parallel-size 2 --decoder-seq-length 64"),
            (2, "--expert-model-parallel-size 2 --decoder-seq-length 50 --micro-batch-size 1"),
            (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
            (1, "--decoder-seq-length 64"),
        ],
    ),
)
def test_padding_does_not_change_experts(
    tmp_path: Path, experts: list[dict[str, float]], ranks: int, layout: str
) -> None:
    found = run_gpt(tmp_path, *FLAGS, *EXPERTS, *layout.split(), world_size=ranks)
    for key in ("lm loss", "seq_load_balancing_loss"):
        same(losses(found, key), losses(experts, key))


def test_a_run_goes_on_in_another_layout(tmp_path: Path, whole: list[float]) -> None:
    saved = str(tmp_path / "ck")
    stages = "--pipeline-model-parallel-size 2 --exit-interval 2 --save".split()
    first = losses(run_gpt(tmp_path / "a", *FLAGS, *stages, saved, world_size=2))
    rest = "--tensor-model-parallel-size 2 --sequence-parallel --load".split()
    same(first + losses(run_gpt(tmp_path / "b", *FLAGS, *rest, saved, world_size=2)), whole)


@pytest.mark.feature("Vision: frozen parts are bitwise unchanged by training (--freeze-LM)")
@pytest.mark.parametrize("layout", ["", "--pipeline-model-parallel-size 2"])
def test_frozen_parts_do_not_change(tmp_path: Path, layout: str) -> None:
    ranks = 2 if layout else 1
    given = [*FLAGS, *layout.split(), "--freeze-LM", "--freeze-ViT", "--use-distributed-optimizer"]
    saved = tmp_path / "ck"
    run_gpt(tmp_path, *given, "--save", str(saved), "--save-interval", "1", world_size=ranks)
    first, last = (weights(saved / f"iter_{step:07d}") for step in (1, 4))
    assert first.keys() == last.keys()
    for name, weight in first.items():
        is_frozen = not name.startswith("vision_projection.")
        assert torch.equal(weight, last[name]) == is_frozen, name


@pytest.mark.feature("Vision: frozen parts have no optimizer state in checkpoints")
def test_frozen_parts_have_no_optimizer_state(tmp_path: Path) -> None:
    saved = tmp_path / "ck"
    run_gpt(tmp_path, *FLAGS, "--freeze-LM", "--freeze-ViT", "--save", str(saved))
    with CheckpointReader(saved / "iter_0000004") as reader:
        entries = {name: entry for name, entry in reader.tensors.items() if "optimizer" in name}
    assert entries
    assert all("vision_projection." in name for name in entries)


@pytest.mark.feature("Vision: FSDP2 shards vision-language models, with frozen parts too")
@pytest.mark.parametrize(
    "frozen",
    selection.first(1, ["--freeze-ViT", "--freeze-LM", "", "--freeze-LM --freeze-ViT"]),
)
def test_fully_sharded_models_have_the_losses_of_one_process(tmp_path: Path, frozen: str) -> None:
    given = [*FLAGS, *frozen.split(), "--no-gradient-accumulation-fusion"]
    one = run_gpt(tmp_path / "one", *given, "--save", str(tmp_path / "ck1"))
    sharded = "--use-torch-fsdp2 --recompute-granularity full --recompute-method uniform "
    sharded += f"--recompute-num-layers 1 --save {tmp_path / 'ck2'}"
    two = run_gpt(tmp_path / "two", *given, *sharded.split(), world_size=2)
    same(losses(two), losses(one))
    last = [weights(tmp_path / folder / "iter_0000004") for folder in ("ck1", "ck2")]
    for name, weight in last[0].items():
        torch.testing.assert_close(last[1][name], weight, **tolerances.LAYOUT_LOSS)


def test_weights_of_frozen_parts_are_sharded_by_other_flags_too(tmp_path: Path) -> None:
    given = [*FLAGS, "--freeze-ViT", "--no-gradient-accumulation-fusion"]
    sharded = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    sharded += " --ckpt-format fsdp_dtensor"
    two = run_gpt(tmp_path / "two", *given, *sharded.split(), world_size=2)
    same(losses(two), losses(run_gpt(tmp_path / "one", *given)))


@pytest.mark.feature("Vision: --recompute-vision recomputes the encoder's layers in backward")
@pytest.mark.parametrize("frozen", selection.first(1, ["--freeze-LM", "--freeze-ViT", ""]))
def test_recomputed_encoders_have_the_same_losses(tmp_path: Path, frozen: str) -> None:
    given = [*FLAGS, *frozen.split()]
    kept = losses(run_gpt(tmp_path / "kept", *given))
    assert losses(run_gpt(tmp_path / "again", *given, "--recompute-vision")) == kept


@pytest.mark.feature("Vision: training goes on from Qwen2-VL of Hugging Face")
def test_a_converted_model_is_trained(tmp_path: Path) -> None:
    qwen().save_pretrained(tmp_path / "theirs")
    source = {"source": tmp_path / "theirs", "target": tmp_path / "ours", "dtype": torch.float32}
    convert(ConversionRequest(**source, format="safetensors_dist", verify=False), lambda _: None)
    given = (
        f"--load {tmp_path / 'ours'} --use-checkpoint-args --model-kind vlm --img-h 16 --img-w 24"
    )
    given += " --seq-length 20 --train-iters 3 --lr 1e-2 --no-load-optim"
    base = [flag for flag in TINY if flag not in ("--vocab-size", "100")]
    wanted = losses(run_gpt(tmp_path / "one", *given.split(), base=base))
    stages = "--pipeline-model-parallel-size 2 --context-parallel-size 2".split()
    found = run_gpt(tmp_path / "four", *given.split(), *stages, base=base, world_size=4)
    same(losses(found), wanted)
    assert wanted[-1] < wanted[0]


def weights(folder: Path) -> dict[str, Tensor]:
    parts = ("language_model.", "vision_model.", "vision_projection.")
    with CheckpointReader(folder) as reader:
        return {key: reader.read(key) for key in reader.tensors if key.startswith(parts)}


def test_all_conflicts_are_reported_at_once() -> None:
    given = [*FLAGS, "--img-h", "25", "--vision-num-attention-heads", "5", "--pixel-shuffle"]
    (said,) = run_ranks(refusal, 1, [*TINY, *given])
    for text in (
        "--img-h 25 is not a multiple of --patch-dim 6",
        "--vision-hidden-size 48 is no multiple of the encoder's 5 attention heads",
        "--pixel-shuffle merges 2 x 2 patches of a square",
    ):
        assert text in said


def test_images_of_any_size_have_no_tiles() -> None:
    given = [*FLAGS, *ANY_SIZE.split(), *"--img-h 30 --use-tiling --pixel-shuffle".split()]
    (said,) = run_ranks(refusal, 1, [*TINY, *given])
    for text in (
        "--img-h 30 is not a multiple of twice --patch-dim 6",
        "--use-tiling with --vision-model-type qwen2_vl, which reads images of any size: leave",
        "--pixel-shuffle with --vision-model-type qwen2_vl",
    ):
        assert text in said


def test_grids_of_tiles_are_checked() -> None:
    given = [*FLAGS, *"--image-grid-pinpoints 24 40 48 --use-tiling --max-num-tiles 4".split()]
    (said,) = run_ranks(refusal, 1, [*TINY, *given])
    for text in (
        "--image-grid-pinpoints 24 40 48: 3 numbers are no pairs of height and width",
        "24 40 are no multiples of --img-h 24 and --img-w 24, the size of a tile",
        "arranges the patches of square tiles: give --img-w equal to --img-h, and",
        "--image-grid-pinpoints 24 40 48 and --use-tiling are two layouts of tiles",
    ):
        assert text in said


def test_patches_are_merged_in_squares_only() -> None:
    given = [*FLAGS, "--img-w", "36", "--disable-vision-class-token", "--pixel-shuffle"]
    (said,) = run_ranks(refusal, 1, [*TINY, *given])
    assert "--pixel-shuffle merges 2 x 2 patches of a square: give" in said


@pytest.mark.feature("Vision: training on image-text shards goes on exactly with other ranks")
@pytest.mark.parametrize(
    "tiles", selection.first(2, [ANY_SIZE, PIXTRAL, IN_ROWS, "--use-tiling --max-num-tiles 4"])
)
def test_shards_of_pictures_train_the_same_on_any_number_of_ranks(
    tmp_path: Path, tiles: str
) -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("transformers")
    from examples.multimodal.quickstart import draw_samples

    draw_samples.write_shard(tmp_path / "train.tar", 48, seed=1)
    draw_samples.write_tokenizer(tmp_path / "tokenizer")
    words = f"--position-embedding-type rope --dataloader-seq-length 24 {tiles}"
    flags = [f for f in (*TINY, *FLAGS) if f not in ("--mock-data", "--vocab-size", "100")]
    base = [*flags, *words.split(), "--data-path", str(tmp_path / "train.tar")]
    base += ["--split", "1,0,0", "--eval-iters", "0", "--data-cache-path", str(tmp_path / "cache")]
    base += ["--tokenizer-type", "MultimodalTokenizer", "--tokenizer-prompt-format", "qwen2p5"]
    base += ["--tokenizer-model", str(tmp_path / "tokenizer")]
    whole = losses(run_gpt(tmp_path / "whole", base=base))
    saved = str(tmp_path / "ck")
    stop = ["--exit-interval", "2", "--save", saved]
    first = losses(run_gpt(tmp_path / "a", *stop, base=base))
    rest = losses(run_gpt(tmp_path / "b", "--load", saved, base=base, world_size=2))
    same(first + rest, whole)


@pytest.mark.feature("Vision: a checkpoint without a projector begins a vision-language model")
def test_a_missing_projector_keeps_its_initial_values_if_allowed(tmp_path: Path) -> None:
    given = [*FLAGS, "--train-iters", "1", "--no-load-optim", "--no-load-rng", "--finetune"]
    run_gpt(tmp_path / "whole", *FLAGS, "--train-iters", "1", "--save", str(tmp_path / "whole"))
    request = ConversionRequest(
        source=tmp_path / "whole",
        target=tmp_path / "without",
        format="safetensors_dist",
        rename=lambda key: None if "vision_projection" in key else key,
    )
    convert(request)
    load = ["--load", str(tmp_path / "without")]
    told = run_ranks(refusal, 1, [*TINY, *given, *load])
    assert "vision_projection" in told[0]
    allowed = "--allow-missing-vision-projection-checkpoint"
    assert len(losses(run_gpt(tmp_path / "b", *given, *load, allowed))) == 1


def test_the_loss_of_weighted_answers_is_their_mean_by_the_root_of_their_length() -> None:
    counts = torch.tensor([4.0, 9.0])
    of_answers = torch.rand(4), torch.rand(9)
    weights = torch.cat([torch.full((int(n),), n.rsqrt()) for n in counts])
    total, count, reported = weighted_loss(weights, torch.cat(of_answers))
    parts = [x.sum() / n.sqrt() for x, n in zip(of_answers, counts, strict=True)]
    torch.testing.assert_close(total / count, sum(parts) / counts.sqrt().sum())
    torch.testing.assert_close(reported["lm loss"], torch.stack([total, count]))
