"""Names of files that come from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.config.errors import CheckpointError, DataError
from megatron.core.text_files import path_inside

NOT_INSIDE = (
    *("", ".", "..", "/", "/etc/passwd", "../a", "a/../b", "a/..", "./a", "a//b", "a/", "//a"),
    *("a\0", "a\nb", "\ud800", "x" * 256, None, 1, ["a"]),
)


@pytest.mark.parametrize("name", NOT_INSIDE)
def test_a_name_that_leaves_the_folder_is_refused(name):
    for below in (False, True):
        with pytest.raises(CheckpointError, match=r"index\.json names the file .* inside folder"):
            path_inside(Path("folder"), name, "index.json", below=below)


def test_a_name_inside_the_folder_is_joined_to_it():
    folder = Path("folder")
    assert path_inside(folder, "model-1.safetensors", "i") == folder / "model-1.safetensors"
    assert path_inside(folder, "a/b", "i", below=True) == folder / "a" / "b"
    with pytest.raises(DataError, match="not a name directly inside folder"):
        path_inside(folder, "a/b", "i", error=DataError)


def test_a_link_is_followed(tmp_path):
    """The cache of the Hugging Face hub is made of links into another folder."""
    (tmp_path / "blob").write_text("x")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").symlink_to("../blob")
    assert path_inside(snapshot, "config.json", "i").read_text() == "x"
