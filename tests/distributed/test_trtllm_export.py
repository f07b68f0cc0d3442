"""Export to TensorRT-LLM by the ranks of a run, in the programs of examples/export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.export.trtllm_export.distributed_export import gpt_distributed_gpu_export
from examples.export.trtllm_export.single_device_export import gpt_single_device_cpu_export
from tests.support.ranks import run_ranks

LAYOUT = "--tensor-parallel 2 --pipeline-parallel 2"


def export(rank: int, world_size: int, folder: Path) -> None:
    gpt_distributed_gpu_export.main(["--output", str(folder), *LAYOUT.split()])


@pytest.mark.feature("Export: ranks of a run write the files that one process slices")
def test_ranks_of_a_run_write_the_files_of_a_single_process(tmp_path: Path) -> None:
    folders = tmp_path / "single", tmp_path / "distributed"
    gpt_single_device_cpu_export.main(["--output", str(folders[0]), *LAYOUT.split()])
    run_ranks(export, 4, folders[1])
    for rank in range(4):
        one, other = (load_file(folder / f"rank{rank}.safetensors") for folder in folders)
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    first, second = ((folder / "config.json").read_text() for folder in folders)
    assert first == second
