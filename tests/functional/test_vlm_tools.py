"""Tools that write text about images: text_generation_cli.py and run_vlm_text_generation.py."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest

from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference import LLM, PromptWithImages
from tests.functional.test_vlm_generation import FLAGS, NUM_NEW, drawn
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, run_gpt
from tools import run_vlm_text_generation, text_generation_cli

pytest.importorskip("PIL")
PROMPT = "5 6 <image> 7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint ``ck``, and a folder ``images`` with five images, one of them damaged."""
    found = tmp_path_factory.mktemp("vlm")
    run_gpt(found, *FLAGS, "--save", str(found / "ck"))
    (found / "images").mkdir()
    for seed in range(4):
        drawn(seed).save(found / "images" / f"{seed}.png")
    (found / "images" / "2b.png").write_bytes(b"no image")
    (found / "images" / "notes.txt").write_text("no image")
    return found


def by_engine(rank: int, world_size: int, folder: str) -> list[str]:
    llm = LLM.load(f"{folder}/ck", device_kind="cpu")
    prompts = [PromptWithImages(PROMPT, [f"{folder}/images/{seed}.png"]) for seed in range(4)]
    params = SamplingParams(num_tokens_to_generate=NUM_NEW, temperature=0.0)
    return [answer.text for answer in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    (found,) = run_ranks(by_engine, 1, str(folder))
    return list(found)


def ran(rank: int, world_size: int, tool: str, words: list[str]) -> tuple[str, str]:
    """Return what a tool writes to stdout and stderr."""
    run = {"cli": text_generation_cli.main, "captions": run_vlm_text_generation.main}[tool]
    out = io.StringIO()
    err = io.StringIO()
    with (
        mock.patch("sys.argv", [f"{tool}.py", *words, "--device", "cpu"]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.suppress(SystemExit),
    ):
        run()
    return out.getvalue(), err.getvalue()


def command_of_page(tool: str) -> list[str]:
    page = (ROOT / "docs" / "vision.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(rf"^python tools/{tool}.py (.*)$", page, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.feature("Generation: images in tools/text_generation_cli.py")
def test_the_command_line_writes_about_an_image(folder: Path, expected: list[str]) -> None:
    words = command_of_page("text_generation_cli")
    words[words.index("--load") + 1] = str(folder / "ck")
    words[words.index("--image") + 1] = str(folder / "images" / "1.png")
    words[words.index("--prompt") + 1] = PROMPT
    words += ["--num-tokens", str(NUM_NEW), "--temperature", "0"]
    (said,) = run_ranks(ran, 1, "cli", words)
    assert said[0].splitlines()[-1] == PROMPT + expected[1], said
    (said,) = run_ranks(ran, 1, "cli", [*words, "--json"])
    assert json.loads(said[0].splitlines()[-1])["text"] == expected[1]
    (said,) = run_ranks(ran, 1, "cli", [*words, "--image", str(folder / "images" / "1.png")])
    assert "1 tags <image> and 2 images" in said[1]


def test_a_server_gets_no_image_from_the_command_line() -> None:
    _, said = ran(0, 1, "cli", ["localhost:1", "--prompt", "5", "--image", "a.png"])
    assert "--image a.png: PUT /api of a server reads text only" in said


def captioning(folder: Path, out: Path, *more: str) -> list[str]:
    words = command_of_page("run_vlm_text_generation")
    words[words.index("--load") + 1] = str(folder / "ck")
    words[words.index("--input-image-path") + 1] = str(folder / "images")
    words[words.index("--output-path") + 1] = str(out)
    words[words.index("--prompt") + 1] = PROMPT
    return [*words, "--out-seq-length", str(NUM_NEW), "--temperature", "0", *more]


@pytest.mark.feature("Generation: captions of a folder of images, resumed after an end at any time")
def test_captions_continue_after_an_end(folder: Path, expected: list[str], tmp_path: Path) -> None:
    out = tmp_path / "captions.jsonl"
    part = tmp_path / "captions.jsonl.part"
    of_training = ["--num-layers", "9", "--tokenizer-prompt-format", "qwen2p5"]
    (said,) = run_ranks(ran, 1, "captions", captioning(folder, out, *of_training))
    warning = "WARNING: --num-layers, --tokenizer-prompt-format: without effect"
    assert [x[: len(warning)] for x in said[0].splitlines() if "without effect" in x] == [warning]
    assert f"{out}: 4 captions, 1 images without one" in said[0], said
    assert "WARNING: 2b.png: no image that can be decoded" in said[0]
    lines = out.read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [row["image"] for row in found if "error" in row] == ["2b.png"]
    rows = sorted((row for row in found if "error" not in row), key=lambda row: row["sample_id"])
    assert [row["sample_id"] for row in rows] == [0, 1, 2, 4]
    assert [row["caption"] for row in rows] == [text.strip() for text in expected]
    done = [{**row, "caption": "kept"} for row in rows[:2]]
    part.write_text("".join(json.dumps(row) + "\n" for row in done) + lines[0][:20])
    (said,) = run_ranks(ran, 2, "captions", captioning(folder, out))[:1]
    assert f"{out}: 4 captions" in said[0], said
    again = [json.loads(line) for line in out.read_text().splitlines()]
    captions = {row["image"]: row["caption"] for row in again if "error" not in row}
    assert captions == {
        **{row["image"]: row["caption"] for row in rows},
        **dict.fromkeys(("0.png", "1.png"), "kept"),
    }
    assert not part.exists()
    (said,) = run_ranks(ran, 1, "captions", captioning(folder, out, "--prompt", "5"))
    assert f"--prompt '5': {out} has captions for" in said[1]


def test_parts_cover_the_folder_once(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "captions.jsonl"
    seen = []
    for number in "01":
        parts = ["--num-partitions", "2", "--partition-id", number]
        (said,) = run_ranks(ran, 1, "captions", captioning(folder, out, *parts))
        lines = (tmp_path / f"captions-{number}-of-2.jsonl").read_text().splitlines()
        seen.append({json.loads(line)["image"] for line in lines})
    assert seen == [{"0.png", "1.png", "2.png"}, {"2b.png", "3.png"}], said


def test_what_does_not_fit_is_reported_at_once(folder: Path, tmp_path: Path) -> None:
    words = ["--gt-path", "a", "--config-path", "b", "--task", "VQAv2", "--partition-id", "3"]
    words += ["--drop-vision-class-token", "--num-samples-per-partition", "0"]
    _, said = ran(0, 1, "captions", words)
    for text in (
        "--load is missing",
        "--input-image-path is missing",
        "--output-path is missing",
        "--gt-path: captions are not scored",
        "--config-path: give its values as flags",
        "--task VQAv2: only captioning",
        "--partition-id 3: give 0 to 0",
        "--num-samples-per-partition: give 1 or more",
        "--drop-vision-class-token: the checkpoint says",
    ):
        assert text in said
    for path in ("none", "ck"):
        at = captioning(folder, tmp_path / "x.jsonl", "--input-image-path", str(folder / path))
        said = ran(0, 1, "captions", at)[1]
        assert f"--input-image-path {folder / path}" in said
