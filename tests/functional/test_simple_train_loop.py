"""The example that uses the library alone."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from examples import run_simple_train_loop
from tests.support import forked, tolerances, user_simple_loop
from tests.support.pages import blocks_of
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT


def _train(rank: int, world_size: int, tp: int) -> list[float]:
    words = ["--train-iters", "8", "--tensor-model-parallel-size", str(tp)]
    return run_simple_train_loop.main(words)


@pytest.mark.feature("Library: a training loop of one's own from megatron.core alone")
def test_the_loop_learns_and_tensor_parallel_ranks_see_the_same_losses():
    (alone,) = run_ranks(_train, 1, 1)
    cut = run_ranks(_train, 2, 2)
    assert alone[-1] < alone[0] - 1
    torch.testing.assert_close(cut, [alone, alone], **tolerances.LAYOUT_LOSS)


def _loaded(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    user_simple_loop.parallel_state.initialize_model_parallel()
    user_simple_loop.model_parallel_cuda_manual_seed(123)
    model = user_simple_loop.model_provider()
    for param in model.parameters():
        param.data.fill_(float("nan"))
    user_simple_loop.load_distributed_checkpoint(folder, model)
    return dict(model.state_dict())


@pytest.mark.feature("Library: the simple training loop of Megatron Core v0.14, unchanged")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_simple_loop_of_megatron_core_trains_saves_and_loads(tmp_path: Path, ranks: int) -> None:
    script = str(Path(user_simple_loop.__file__))
    done = subprocess.run(
        [*forked.torchrun(ranks), script, str(tmp_path / "ckpt"), str(ranks)],
        env={**user_simple_loop.os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Losses reduced") == 5 * ranks
    assert done.stdout.count("Successfully loaded the model") == ranks
    (weights,) = run_ranks(_loaded, 1, str(tmp_path / "ckpt"))
    assert all(bool(value.isfinite().all()) for value in weights.values())


def _run_page(rank: int, world_size: int, folder: str, steps: int) -> str:
    (code,) = [b.code for b in blocks_of(ROOT / "docs/library.md") if b.language == "python"]
    torch.distributed.destroy_process_group()
    store = torch.distributed.FileStore(f"{folder}/store{steps}", world_size)
    start = partial(
        torch.distributed.init_process_group, store=store, rank=rank, world_size=world_size
    )
    script = Path(folder, f"library_model{rank}{steps}.py")
    script.write_text(code)
    printed = io.StringIO()
    with (
        mock.patch("sys.argv", ["library_model.py", f"{folder}/model", str(steps)]),
        mock.patch("torch.distributed.init_process_group", start),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def test_the_model_of_the_library_page_trains_saves_reshards_and_writes(tmp_path):
    page = (ROOT / "docs/library.md").read_text()
    trained = run_ranks(_run_page, 2, str(tmp_path), 30)
    assert trained[0].strip() in page
    assert run_ranks(_run_page, 1, str(tmp_path), 0) == [trained[0]]
