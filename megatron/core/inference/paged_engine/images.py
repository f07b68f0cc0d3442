"""Images in prompts: an id for each of their embeddings, and the embeddings on the first stage.

Each embedding of an image is a row of the prompt.  Its id is `FIRST_ID` or more and tells its
image, by the pixels, and its place in the image: requests with equal images share their pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FIRST_ID = 1 << 62
PLACE_BITS = 20
_KEY_BITS = 62 - PLACE_BITS

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image of a prompt: ``pixels`` f32 [t, 3, H, W] of its tiles, and how many rows it has."""

    pixels: npt.NDArray[np.float32]
    num_rows: int

    def __post_init__(self) -> None:
        assert 0 < self.num_rows < 1 << PLACE_BITS

    @cached_property
    def key(self) -> int:
        """The image's content as a number."""
        seen = hashlib.blake2b(repr(self.pixels.shape).encode(), digest_size=8)
        seen.update(np.ascontiguousarray(self.pixels).tobytes())
        return int.from_bytes(seen.digest()) >> (64 - _KEY_BITS)

    @property
    def ids(self) -> list[int]:
        """The ids of its rows."""
        first = FIRST_ID + (self.key << PLACE_BITS)
        return list(range(first, first + self.num_rows))

    def to_array(self) -> Ids:
        """Return the image as one array of int64."""
        bits = np.ascontiguousarray(self.pixels).ravel().view(np.int32).astype(np.int64)
        return np.concatenate([[self.num_rows, *self.pixels.shape], bits])

    @staticmethod
    def size_of(head: Ids) -> int:
        """Return the length of the array that begins with the five numbers ``head``."""
        return 5 + int(np.prod(head[1:5]))

    @staticmethod
    def from_array(array: Ids) -> PromptImage:
        """Return the image that `to_array` wrote."""
        pixels = array[5:].astype(np.int32).view(np.float32).reshape(array[1:5])
        return PromptImage(pixels, int(array[0]))


def text_of(ids: Iterable[int]) -> list[int]:
    """Return the ids of a prompt that are tokens of text."""
    return [token for token in ids if token < FIRST_ID]


class ImageStore:
    """Embeddings of the images of running requests, on a rank of the first stage.

    ``encode(pixels [t, 3, H, W])`` returns the rows [n, h]; collective over the tensor-parallel
    group.  An image is encoded when a step first has rows of it: never if the prefix cache has all.
    ``weight_version()`` changes with the weights, which makes embeddings old.
    """

    def __init__(
        self,
        encode: Callable[[Tensor], Tensor],
        device: torch.device,
        weight_version: Callable[[], int],
    ) -> None:
        self._weight_version = weight_version
        self._encoded_by = weight_version()
        self._encode = encode
        self._device = device
        self._of_slot: dict[int, tuple[PromptImage, ...]] = {}
        self._rows: dict[int, Tensor] = {}  # by key of the image

    def admit(self, slot: int, images: tuple[PromptImage, ...]) -> None:
        """Note the images of the request that takes ``slot``; forget those of the one before."""
        self._of_slot.pop(slot, None)
        if images:
            self._of_slot[slot] = images
        kept = {image.key for held in self._of_slot.values() for image in held}
        self._rows = {key: rows for key, rows in self._rows.items() if key in kept}

    def embed(self, ids: Ids, text: Callable[[Ids], Tensor]) -> Tensor | None:
        """Return the embeddings [N, 1, h] of rows ``ids``; None if they are all text.

        ``text`` embeds ids of text, which stand in the places of images too.
        """
        of_image = np.flatnonzero(ids >= FIRST_ID)
        if not len(of_image):
            return None
        if self._encoded_by != (version := self._weight_version()):
            self._rows.clear()
            self._encoded_by = version
        embedded = text(np.where(ids >= FIRST_ID, 0, ids))
        keys, places = np.divmod(ids[of_image] - FIRST_ID, 1 << PLACE_BITS)
        for key in dict.fromkeys(keys.tolist()):
            mine = keys == key
            rows = self._encoded(key)[torch.from_numpy(places[mine]).to(self._device)]
            at = torch.from_numpy(of_image[mine]).to(self._device)
            embedded[at, 0] = rows.to(embedded.dtype)
        return embedded

    def _encoded(self, key: int) -> Tensor:
        if key not in self._rows:
            known = (image for held in self._of_slot.values() for image in held)
            image = next(image for image in known if image.key == key)
            self._rows[key] = self._encode(torch.from_numpy(image.pixels).to(self._device))
            assert len(self._rows[key]) == image.num_rows, "the ids have been counted"
        return self._rows[key]


def images_to_arrays(images: Mapping[int, tuple[PromptImage, ...]]) -> list[Ids]:
    """Return images by slot as arrays: slot and number, then each image."""
    parts: list[Ids] = []
    for slot, found in images.items():
        parts.append(np.array([slot, len(found)]))
        parts += (image.to_array() for image in found)
    return parts
