"""Runs of pretrain_vision_classify.py: layouts, other layouts after a resume, folders of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.training.conversion.convert import ConversionRequest, convert
from tests.support import selection, tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import losses, refusal, run_gpt
from tests.unit.conversion.test_image_classifier import theirs

BASE = (
    "--model-kind vit --device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 4 --mock-data --seed 5 "
    "--img-h 12 --img-w 12 --patch-dim 4 --num-classes 7 --hidden-dropout 0 --attention-dropout 0 "
    "--log-interval 1 --eval-interval 1000 --eval-iters 1 --num-workers 0"
).split()


def run(folder: Path, *flags: str, world_size: int = 1) -> list[float]:
    return losses(run_gpt(folder, *flags, base=BASE, world_size=world_size), "loss")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run in one process."""
    return run(tmp_path_factory.mktemp("whole"))


def same(found: list[float], wanted: list[float]) -> None:
    assert len(found) == 4
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), **tolerances.LAYOUT_LOSS)


@pytest.mark.feature("Vision: pretrain_vision_classify.py has one process's losses in every layout")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    selection.first(
        2,
        [
            # 10 embeddings, padded to 12
            (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
            (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
            (2, "--tensor-model-parallel-size 2"),
            (
                4,
                "--tensor-model-parallel-size 2 --sequence-parallel "
                "--pipeline-model-parallel-size 2",
            ),
            (2, "--use-torch-fsdp2 --no-gradient-accumulation-fusion"),
        ],
    ),
)
def test_every_layout_has_the_losses_of_one_process(
    tmp_path: Path, whole: list[float], ranks: int, layout: str
) -> None:
    same(run(tmp_path, *layout.split(), world_size=ranks), whole)


def test_a_run_goes_on_in_another_layout(tmp_path: Path, whole: list[float]) -> None:
    stages = "--pipeline-model-parallel-size 2 --exit-interval 2 --save".split()
    first = run(tmp_path / "a", *stages, str(tmp_path / "ck"), world_size=2)
    rest = "--tensor-model-parallel-size 4 --sequence-parallel --load".split()
    same(first + run(tmp_path / "b", *rest, str(tmp_path / "ck"), world_size=4), whole)


@pytest.mark.feature("Vision: pretrain_vision_classify.py reports the accuracy of evaluations")
def test_classes_of_mock_images_are_learned(tmp_path: Path) -> None:
    found = run_gpt(tmp_path, *"--train-iters 80 --lr 3e-3 --eval-iters 8".split(), base=BASE)
    (validation,) = losses(found, "accuracy validation")
    assert validation > 0.9


def test_the_images_that_fill_the_last_batch_do_not_count(tmp_path: Path) -> None:
    draw(tmp_path / "images", images=3)  # 9 images, batches of 8
    base = [*(flag for flag in BASE if flag != "--mock-data"), *folders(tmp_path)]
    base += "--full-validation --train-iters 1 --eval-interval 1 --lr 0 --min-lr 0".split()
    sizes = ("--global-batch-size 8", "--micro-batch-size 3 --global-batch-size 9")
    one, other = (run_gpt(tmp_path / size, *size.split(), base=base) for size in sizes)
    for key in ("loss validation", "accuracy validation"):
        assert losses(one, key) == pytest.approx(losses(other, key), rel=1e-6)


def draw(root: Path, *, images: int, broken: bool = False) -> None:
    """Write PNG files of three classes, whose images are red, green and blue."""
    image_module = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(3)
    for label, name in enumerate(("red", "green", "blue")):
        (root / name).mkdir(parents=True)
        for i in range(images):
            pixels = random.integers(0, 90, (15, 18 + i, 3), np.uint8)
            pixels[..., label] += 160
            image_module.fromarray(pixels).save(root / name / f"{i}.png")
    if broken:
        (root / "red" / "0.png").write_bytes(b"no image")


def folders(tmp_path: Path) -> list[str]:
    images = str(tmp_path / "images")
    return ["--data-path", images, images]


@pytest.mark.feature("Vision: image folders train the same after a resume on other ranks")
def test_folders_of_images_train_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    draw(tmp_path / "images", images=9, broken=True)
    base = [*(flag for flag in BASE if flag != "--mock-data"), *folders(tmp_path)]
    wanted = losses(run_gpt(tmp_path / "whole", base=base), "loss")
    stop = ["--exit-interval", "2", "--save", str(tmp_path / "ck")]
    found = losses(run_gpt(tmp_path / "a", *stop, base=base), "loss")
    load = ["--load", str(tmp_path / "ck")]
    found += losses(run_gpt(tmp_path / "b", *load, base=base, world_size=2), "loss")
    same(found, wanted)


def test_a_converted_model_is_trained(tmp_path: Path) -> None:
    theirs(tmp_path / "theirs")
    request = {"source": tmp_path / "theirs", "target": tmp_path / "ours", "verify": False}
    convert(ConversionRequest(**request, format="safetensors_dist"), lambda _: None)
    words = f"--model-kind vit --load {tmp_path / 'ours'} --use-checkpoint-args --no-load-optim"
    shape = ("--num-layers", "--hidden-size", "--num-attention-heads", "--num-classes", "--img-h")
    base = [*words.split(), *BASE[2:]]
    for flag in (*shape, "--img-w", "--patch-dim"):
        at = base.index(flag)
        del base[at : at + 2]
    wanted = losses(run_gpt(tmp_path / "one", base=base), "loss")
    found = run_gpt(tmp_path / "two", "--tensor-model-parallel-size", "2", base=base, world_size=2)
    same(losses(found, "loss"), wanted)


def test_all_conflicts_are_reported_at_once() -> None:
    wrong = "--img-h 13 --num-channels 1 --vision-backbone-type swin --classes-fraction 0".split()
    (said,) = run_ranks(refusal, 1, [*BASE, *wrong, "--vision-pretraining-type", "dino"])
    for text in (
        "--img-h 13 is not a multiple of --patch-dim 4",
        "--num-channels 1 is not available in this program: give 3",
        "--vision-backbone-type swin is not available in this program: give vit",
        "--vision-pretraining-type dino is not available in this program: give classify",
        "--classes-fraction 0.0 leaves no images: give a number over 0, at most 1",
    ):
        assert text in said


def test_too_many_classes_are_refused(tmp_path: Path) -> None:
    draw(tmp_path / "images", images=1)
    base = [*(flag for flag in BASE if flag != "--mock-data"), *folders(tmp_path)]
    (said,) = run_ranks(refusal, 1, [*base, "--num-classes", "2"])
    assert "has 3 classes, --num-classes is 2: give --num-classes 3" in said
