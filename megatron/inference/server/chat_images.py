"""Images in messages of a chat: from URLs to pixels.  The server fetches nothing.

A ``data:`` URL has the bytes of an image.  A ``file:`` URL names a file under the folder of
--allowed-local-media-path.
"""

from __future__ import annotations

import base64
import os
import re
import stat
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from megatron.core.config.errors import ConfigError
from megatron.core.inference.paged_engine.request import PromptImage, RequestError
from megatron.inference.image_prompts import ImagePrompts
from megatron.inference.server.fields import ApiError

PARAM = "messages.content.image_url"
_DATA_URL = re.compile(r"data:image/[\w.+-]+(?:;[\w.=+-]+)*;base64,", re.IGNORECASE)
_MAX_FILE_BYTES = 64 << 20
# Pixels of all samples of a request: each sample's message to the engine holds them as base64.
_MAX_PIXEL_BYTES = 40 << 20
_SHOWN = 80  # characters of a URL in an error message


class ImageFiles:
    """The bytes that URLs stand for; files only under ``folder``, none if it is None."""

    def __init__(self, folder: str | None) -> None:
        if folder is not None and not os.path.isdir(folder):
            raise ConfigError(
                f"--allowed-local-media-path {folder} is no directory: give the folder whose "
                "images clients may name"
            )
        self._folder = None if folder is None else os.path.realpath(folder)

    def read(self, url: str, name: str) -> bytes:
        """Return the bytes of the image ``url``.  Raises ApiError, which has ``name``."""
        if found := _DATA_URL.match(url):
            try:
                return base64.b64decode(url[found.end() :], validate=True)
            except ValueError as error:
                raise _fail(name, f"no base64 after 'base64,': {error}") from None
        try:
            scheme, host, path, *others = urlsplit(url)
        except ValueError:
            scheme = ""
        if scheme in ("http", "https"):
            raise _fail(name, f"{url[:_SHOWN]!r}: this server fetches nothing; send a data: URL")
        if scheme != "file" or host not in ("", "localhost") or any(others):
            raise _fail(
                name,
                f"{url[:_SHOWN]!r} is no URL of an image that this server reads: send "
                "data:image/png;base64,... or file:///...",
            )
        return self._read_file(unquote(path), name)

    def _read_file(self, path: str, name: str) -> bytes:
        if self._folder is None:
            raise _fail(
                name,
                "this server reads no files: send a data: URL, or start the server with "
                "--allowed-local-media-path DIR",
            )
        is_plain = "\0" not in path and ".." not in path.split("/")
        real = os.path.realpath(path) if is_plain else ""
        if not real.startswith(os.path.join(self._folder, "")) and real != self._folder:
            raise _fail(
                name,
                f"{path[:_SHOWN]!r} is not under --allowed-local-media-path, symbolic links "
                "resolved and without ..: name a file of that folder",
            )
        try:
            with open(real, "rb", opener=_open) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise _fail(name, f"{path[:_SHOWN]!r} is no file: name an image")
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise _fail(name, f"{path[:_SHOWN]!r}: {error.strerror}") from None
        if len(data) > _MAX_FILE_BYTES:
            raise _fail(name, f"{path[:_SHOWN]!r} has more than {_MAX_FILE_BYTES} bytes: reduce it")
        return data


def prompt_of(
    prompts: ImagePrompts,
    rows: Sequence[list[int]],
    urls: Sequence[str],
    files: ImageFiles,
    *,
    max_rows: int,
    num_samples: int,
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return the ids of a rendered chat with its images.  Raises ApiError.

    ``rows``: the ids of its texts, as `ImagePrompts.rendered` takes them.  ``max_rows``: of all
    images; ``num_samples``: each repeats the pixels.
    It reads files and decodes images, for a thread.  At most one image above the limits is decoded.
    """
    images: list[PromptImage] = []
    for index, url in enumerate(urls):
        name = f"image {index}"
        try:
            images.append(prompts.read(files.read(url, name), name))
        except RequestError as error:
            raise ApiError(f"{PARAM}: {error}", PARAM) from None
        num_rows = sum(image.num_rows for image in images)
        if num_rows > max_rows:
            raise _fail(
                name,
                f"images up to this one need {num_rows} positions, the model has {max_rows}: send "
                "fewer",
                code="context_length_exceeded",
            )
        num_bytes = sum(image.pixels.nbytes for image in images) * num_samples
        if num_bytes > _MAX_PIXEL_BYTES:
            raise _fail(
                name,
                f"pixels up to this one, times n, have {num_bytes} bytes, at most "
                f"{_MAX_PIXEL_BYTES}: send fewer images, or reduce n",
            )
    try:
        return prompts.rendered(rows, images)
    except RequestError as error:
        raise ApiError(f"messages: {error}", "messages") from None


def _open(path: str, flags: int) -> int:
    """Open a file: a link that has replaced it is not followed, and a pipe does not block."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _fail(name: str, reason: str, code: str | None = None) -> ApiError:
    return ApiError(f"{PARAM}: {name}: {reason}", PARAM, code=code)
