"""The environment of a run on a GPU, and NCCL's record of the last collectives."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from megatron.training.process.preflight import set_gpu_defaults


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_kernels_are_cached_on_this_node_in_a_folder_of_this_user(temporary: Path) -> None:
    environ: dict[str, str] = {}
    set_gpu_defaults(environ)
    folder = Path(environ["TRITON_CACHE_DIR"])
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o777 == 0o700
    again: dict[str, str] = {}
    set_gpu_defaults(again)
    assert again == environ


def test_the_environment_of_the_user_stays(temporary: Path) -> None:
    given = {"TRITON_CACHE_DIR": "/elsewhere", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    environ = dict(given)
    set_gpu_defaults(environ)
    assert {name: environ[name] for name in given} == given
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("kind", ["writable", "link", "file"])
def test_a_folder_that_others_can_write_to_is_no_cache(kind: str, temporary: Path) -> None:
    environ: dict[str, str] = {}
    set_gpu_defaults(environ)
    folder = Path(environ.pop("TRITON_CACHE_DIR"))
    if kind == "writable":
        folder.chmod(0o777)
    else:
        folder.rmdir()
        folder.symlink_to(temporary) if kind == "link" else folder.touch()
    set_gpu_defaults(environ)
    assert "TRITON_CACHE_DIR" not in environ
