"""The openai package sends images to a server: the text of the engine, and errors with a field."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference import LLM, PromptWithImages
from megatron.inference.server.chat_images import ImageFiles
from megatron.inference.server.fields import ApiError
from tests.support import forked
from tests.support.pages import python_of
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, run_gpt
from tests.support.server_process import ROOT, Server, fake_server, openai, started

pytest.importorskip("PIL")
pytest.importorskip("transformers")

FLAGS = (
    "--model-kind vlm --vision-num-layers 1 --img-h 24 --img-w 24 --patch-dim 6 --train-iters 8 "
    "--vision-model-type clip --vision-hidden-size 48 --vision-num-attention-heads 6 --lr 1e-2 "
    "--position-embedding-type rope --max-position-embeddings 160 --dataloader-seq-length 40 "
    "--seq-length 20 --decoder-seq-length 150 --use-tiling --max-num-tiles 4 --use-thumbnail "
    "--split 1,0,0 --eval-iters 0 --tokenizer-type MultimodalTokenizer "
    "--tokenizer-prompt-format qwen2p5 --image-tag-type nvlm"
).split()
NUM_NEW = 8
TOOL = str(ROOT / "tools" / "run_text_generation_server.py")
QUESTION = "What is in the picture?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint ``ck``, and a folder ``media`` of pictures; ``secret.png`` is outside of it."""
    from examples.multimodal.quickstart import draw_samples

    found: Path = tmp_path_factory.mktemp("served")
    draw_samples.write_shard(found / "train.tar", 48, seed=1)
    draw_samples.write_tokenizer(found / "tokenizer")
    base = [flag for flag in TINY if flag not in ("--mock-data", "--vocab-size", "100")]
    base += ["--data-path", str(found / "train.tar"), "--data-cache-path", str(found / "cache")]
    base += [*FLAGS, "--tokenizer-model", str(found / "tokenizer")]
    run_gpt(found / "run", "--save", str(found / "ck"), base=base)
    media = found / "media"
    media.mkdir()
    for name, color, size in (("a", "red", (24, 24)), ("b c", "blue", (72, 24))):
        (media / f"{name}.png").write_bytes(png(color, size))
    (found / "secret.png").write_bytes(png("green"))
    (media / "link.png").symlink_to(found / "secret.png")
    os.mkfifo(media / "pipe.png")
    return found


def png(color: str, size: tuple[int, int] = (24, 24)) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    command = [forked.python(), TOOL, "--load", str(folder / "ck"), "--device", "cpu"]
    command += ["--port", "0"]
    with started([*command, "--allowed-local-media-path", str(folder / "media")]) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def image(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def asked(*parts: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(parts)}]
    return {"model": "ck", "messages": messages, "temperature": 0, "max_tokens": NUM_NEW}


CASES = {
    "before": (f"<image>\n{QUESTION}", ["a"]),
    "several tiles": (f"{QUESTION}<image>", ["b c"]),
    "two": ("<image> and <image>", ["b c", "a"]),
    "none": (QUESTION, []),
}


def parts_of(content: str, urls: list[str]) -> list[dict[str, Any]]:
    first, *others = content.split("<image>")
    parts = [text(first)] if first else []
    for url, after in zip(urls, others, strict=True):
        parts += [image(url, detail="auto"), *([text(after)] if after else [])]
    return parts


def by_engine(rank: int, world_size: int, folder: str) -> dict[str, tuple[str, int]]:
    """Return the text of each case, and the number of rows of its prompt."""
    llm = LLM.load(f"{folder}/ck", device_kind="cpu")
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=NUM_NEW)
    found = {}
    for name, (content, files) in CASES.items():
        turns = [{"role": "user", "content": content}]
        paths = [f"{folder}/media/{file}.png" for file in files]
        (answer,) = llm.generate(PromptWithImages(turns, paths), params)
        assert llm._image_prompts is not None
        found[name] = answer.text, len(llm._image_prompts.prompt(turns, paths)[0])
    return found


def run_page(rank: int, world_size: int, code: str, folder: str) -> str:
    """Run a block of a page in ``folder``; return what it prints."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(code, {})
    return said.getvalue()


@pytest.mark.parametrize("page", ["serving", "vision"])
def test_the_programs_of_the_pages_run(page, folder, server, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "vlm").symlink_to(folder / "ck")
    (tmp_path / "picture.png").write_bytes(png("red"))
    blocks = [block.code for block in python_of(ROOT / "docs" / f"{page}.md")]
    (code,) = [code for code in blocks if "picture.png" in code]
    code = code.replace("http://localhost:5000", server.url)
    code = code.replace("/data/pictures/cat.png", f"{folder}/media/a.png")
    (said,) = run_ranks(run_page, 1, code, str(tmp_path))
    assert said.endswith("\n")


@pytest.mark.feature("Serving: images in messages of a chat, with the text of the engine")
def test_a_chat_about_images_has_the_text_of_the_engine(folder, client):
    (expected,) = run_ranks(by_engine, 1, str(folder))
    for name, (content, files) in CASES.items():
        paths = [folder / "media" / f"{file}.png" for file in files]
        for urls in ([data_url(p.read_bytes()) for p in paths], [p.as_uri() for p in paths]):
            found = client.chat.completions.create(**asked(*parts_of(content, urls)))
            said = found.choices[0].message.content, found.usage.prompt_tokens
            assert said == expected[name], name
    body = asked(*parts_of(content, urls))
    streamed = client.chat.completions.create(**body, stream=True)
    whole = "".join(part.choices[0].delta.content or "" for part in streamed if part.choices)
    assert whole == expected[name][0]
    several = client.chat.completions.create(**{**body, "temperature": 1}, n=3, seed=1)
    assert len(several.choices) == 3
    assert several.usage.prompt_tokens == expected[name][1]


def test_the_example_of_the_page_runs(folder, server, capsys):
    page = (ROOT / "docs" / "serving.md").read_text()
    (code,) = [c for c in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "image" in c]
    code = code.replace("http://localhost:5000", server.url)
    for path in ("picture.png", "/data/pictures/cat.png"):
        assert path in code
        code = code.replace(path, str(folder / "media" / "a.png"))
    exec(compile(code, "serving.md", "exec"), {})  # noqa: S102
    assert capsys.readouterr().out.endswith("\n")


def test_without_a_folder_no_file_is_read(folder):
    with pytest.raises(ApiError, match="image 0: this server reads no files"):
        ImageFiles(None).read((folder / "media" / "a.png").as_uri(), "image 0")


def test_a_folder_that_does_not_exist_is_reported():
    with pytest.raises(ConfigError, match="--allowed-local-media-path /nowhere is no directory"):
        ImageFiles("/nowhere")


BAD = {
    "base64": ("data:image/png;base64,???", "image 1: no base64"),
    "kind": ("data:text/plain;base64,QUJD", "image 1: 'data:text/plain;base64,QUJD' is no URL"),
    "truncated": (data_url(png("red")[:60]), "image 1: no image that can be decoded"),
    "no image": (data_url(b"hello"), "image 1: no image that can be decoded"),
    "fetch": ("http://localhost/a.png", "this server fetches nothing"),
    "encrypted": ("https://localhost/a.png", "this server fetches nothing"),
    "outside": ("file://{folder}/secret.png", "is not under --allowed-local-media-path"),
    "link": ("file://{folder}/media/link.png", "is not under --allowed-local-media-path"),
    "parent": ("file://{folder}/media/../secret.png", "is not under --allowed-local-media-path"),
    "coded": ("file://{folder}/media/%2e%2e/secret.png", "is not under --allowed-local-media-path"),
    "null": ("file://{folder}/media/%00.png", "is not under --allowed-local-media-path"),
    "missing": ("file://{folder}/media/none.png", "No such file"),
    "directory": ("file://{folder}/media", "Is a directory"),
    "pipe": ("file://{folder}/media/pipe.png", "no file"),
    "host": ("file://other/a.png", "is no URL"),
    "plain": ("{folder}/media/a.png", "is no URL"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_image_is_an_error_with_its_index(folder, client, case):
    url, message = BAD[case]
    parts = [image(data_url(png("red"))), image(url.format(folder=folder)), text(QUESTION)]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**asked(*parts))
    assert error.value.param == "messages.content.image_url"
    assert error.value.body["message"].startswith("messages.content.image_url: image 1: ")
    assert message in error.value.body["message"]


@pytest.mark.parametrize(
    ("parts", "param", "message"),
    [
        ([text("<image> What?")], "messages", "<image>"),
        ([text("<ima"), text("ge> What?")], "messages", "<image>"),
        ([image("data:,", detail="low")], "messages.content.image_url.detail", "auto"),
        ([{"type": "image_url", "image_url": 3}], "messages.content.image_url", "object"),
        ([{"type": "image_url", "image_url": {}}], "messages.content.image_url.url", "string"),
        ([{"type": "input_audio"}], "messages", "text and image_url"),
        ([image(data_url(png("red", (72, 24))))] * 3, "messages.content.image_url", "positions"),
    ],
    ids=["tag", "split tag", "detail", "no object", "no url", "audio", "too many"],
)
def test_messages_that_do_not_fit_are_refused(client, parts, param, message):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**asked(*parts))
    assert error.value.param == param
    assert message in error.value.body["message"]


def test_images_stand_in_messages_of_the_user(client):
    body = asked(text(QUESTION))
    content = [image(data_url(png("red")))]
    body["messages"].insert(0, {"role": "system", "content": content})
    with pytest.raises(openai.BadRequestError, match="messages of the user"):
        client.chat.completions.create(**body)


def test_a_model_of_text_refuses_images(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }}")
    with fake_server(tmp_path, "--chat-template", str(template)) as server:
        body = {**asked(image(data_url(png("red")))), "model": "fake"}
        status, found = server.ask("POST", "/v1/chat/completions", body)
        assert (status, found["error"]["param"]) == (400, "messages")
        assert "parts of type text only" in found["error"]["message"]
