"""Data flags that name files: what the files say, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.core import device
from megatron.core.config.errors import DataError
from megatron.training.config.data import DataConfig
from megatron.training.data.loaders import get_blend_and_blend_per_split
from megatron.training.models import gpt
from tests.support.command_lines import run_of

PER_SPLIT = "--per-split-data-args-path"


def per_split(path: Path, content: object) -> list[object]:
    path.write_text(json.dumps(content))
    return get_blend_and_blend_per_split(DataConfig(per_split_data_args_path=str(path)))[1]


def test_a_file_holds_what_would_follow_data_path(tmp_path: Path) -> None:
    file = tmp_path / "paths"
    file.write_text("0.3 a\n0.7 b\n")
    blend = get_blend_and_blend_per_split(DataConfig(data_args_path=str(file)))
    assert blend == ((["a", "b"], [0.3, 0.7]), None)


def test_a_json_file_holds_the_paths_of_each_split(tmp_path: Path) -> None:
    file = tmp_path / "paths.json"
    assert per_split(file, {"train": [1, "a", "2", "b"], "valid": ["c"], "test": None}) == [
        (["a", "b"], [1.0, 2.0]),
        (["c"], None),
        None,
    ]
    assert per_split(file, {"train": ["a"]}) == [(["a"], None), None, None]


@pytest.mark.parametrize(
    "content",
    [
        {"tran": ["a"]},
        {"train": "a"},
        ["a"],
        {},
        {"train": []},
        {"train": [["a"]]},
        {"train": [1, {"a": 1}]},
        {"train": [None, "a"]},
        {"train": [True, "a"]},
        {"valid": {"a": 1}},
        None,
    ],
)
def test_a_json_file_of_another_form_is_named_with_what_is_needed(
    tmp_path: Path, content: object
) -> None:
    file = tmp_path / "paths.json"
    with pytest.raises(DataError) as caught:
        per_split(file, content)
    message = str(caught.value)
    assert message.startswith(f"{PER_SPLIT} {file}: an object with the lists train, valid and test")
    assert message.endswith(f"prefixes is needed, not {content!r}")


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "paths.json"
    for flag, config in (
        (PER_SPLIT, DataConfig(per_split_data_args_path=str(file))),
        ("--data-args-path", DataConfig(data_args_path=str(file))),
    ):
        with pytest.raises(DataError, match=f"{flag} {file}: no such file"):
            get_blend_and_blend_per_split(config)
    file.write_text("{")
    with pytest.raises(DataError, match=f"{PER_SPLIT} {file}: an object .*not JSONDecodeError"):
        get_blend_and_blend_per_split(DataConfig(per_split_data_args_path=str(file)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1 caf\xe9", "not UTF-8 text"),
        (b"\xff\xfe1\x00", "not UTF-8 text"),
        (b"", "names no data"),
        (b" \n\n", "names no data"),
    ],
)
def test_a_list_of_paths_in_another_encoding_is_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "paths"
    file.write_bytes(content)
    for flag in ("--data-args-path", PER_SPLIT):
        config = DataConfig(**{flag[2:].replace("-", "_"): str(file)})
        if flag == PER_SPLIT and "no data" in message:
            message = "JSONDecodeError"
        with pytest.raises(DataError, match=f"^{flag} {file}.*{message}"):
            get_blend_and_blend_per_split(config)


@pytest.mark.parametrize("content", ["[" * 100_000, "1" * 5000])
def test_json_that_python_cannot_read_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "paths.json"
    file.write_text(content)
    with pytest.raises(DataError, match=f"^{PER_SPLIT} {file}"):
        get_blend_and_blend_per_split(DataConfig(per_split_data_args_path=str(file)))


def test_a_directory_and_an_unreadable_file_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="no such file"):
        get_blend_and_blend_per_split(DataConfig(data_args_path=str(tmp_path)))
    (tmp_path / "paths").write_text("a")

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(DataError, match="--data-args-path .*Permission denied"):
        get_blend_and_blend_per_split(DataConfig(data_args_path=str(tmp_path / "paths")))


@pytest.mark.feature("Data: attention masks are built only where attention reads them")
@pytest.mark.parametrize("flags", ["", "--reset-attention-mask"])
def test_a_run_builds_masks_only_where_attention_reads_them(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(flags, without=("--no-create-attention-mask-in-dataloader",))
    monkeypatch.setattr(gpt, "GPTDatasetConfig", SimpleNamespace)
    is_read = gpt.GPT.batch(run, 0, 1)["attention_mask"] is not None
    assert gpt.gpt_dataset_config(run).create_attention_mask == is_read == bool(flags)


@pytest.mark.parametrize(
    ("flags", "has_bounds"),
    [
        ("--bf16", True),
        ("", False),  # flash attention has 16 bits only
        ("--bf16 --attention-dropout 0.1", False),
        ("--bf16 --softmax-type learnable", False),
        ("--bf16 --enable-cuda-graph", False),
    ],
)
def test_documents_on_a_gpu_are_bounds_where_flash_attention_takes_them(
    flags: str, has_bounds: bool
) -> None:
    words = f"--reset-attention-mask --attention-dropout 0 {flags}"
    with device.simulate_device("cuda"):
        run = run_of(words, without=("--no-create-attention-mask-in-dataloader",))
        assert gpt.text_arguments(run)["mask_as_bounds"] == has_bounds
    assert not gpt.text_arguments(run)["mask_as_bounds"], "the mask of a CPU"
