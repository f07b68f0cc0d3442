"""Strings of a checkpoint's own files are not used as paths or formats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.core.config.errors import CheckpointDamaged
from megatron.core.dist_checkpointing.all_ranks import save
from megatron.core.dist_checkpointing.formats import open_reader
from megatron.core.dist_checkpointing.manifest import FileEntry, read_manifest, write_manifest
from megatron.core.dist_checkpointing.megatron_formats.dcp_writer import write_metadata
from megatron.core.dist_checkpointing.megatron_formats.torch_dist import (
    _fill_placeholders,
    _insert_placeholders,
)
from tests.unit.dist_checkpointing.test_faulty_files import contents as contents

NAMES = ("../../../../etc/passwd", "/etc/passwd", "..", "", "a/../../b")


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_names_no_file_outside_its_folder(tmp_path, contents, name):
    folder = save(tmp_path, 1, contents, None).folder
    manifest = read_manifest(folder)
    files = {**manifest.files, name: FileEntry(1, 1, 1)}
    write_manifest(folder, replace(manifest, files=files))
    with pytest.raises(CheckpointDamaged, match=r"metadata\.json names the file .* not a name"):
        open_reader(folder)


@pytest.mark.parametrize("name", NAMES)
def test_an_index_of_torch_names_no_file_outside_its_folder(tmp_path, name):
    place = {"file": name, "start": 0, "num_bytes": 8, "offset": [0], "shape": [2]}
    entry = {"dtype": "float32", "shape": [2], "pieces": [place]}
    write_metadata(tmp_path, {"model.weight": entry}, {})
    with pytest.raises(CheckpointDamaged, match=r"\.metadata names the file .* not a name"):
        open_reader(tmp_path)


def test_a_key_of_torch_dist_is_no_format_string():
    pattern, count = _insert_placeholders("decoder.layers.mlp.{0.__class__}.weight")
    assert _fill_placeholders(pattern, range(count)) == "decoder.layers.0.mlp.{0.__class__}.weight"
    with pytest.raises(CheckpointDamaged, match="no name of a tensor"):
        _insert_placeholders("decoder.layers.mlp.{}.weight")
