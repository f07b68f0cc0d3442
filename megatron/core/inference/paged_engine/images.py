"""Embeddings of the images in prompts, on the first pipeline stage."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron.core.inference.paged_engine.prompt_images import (
    FIRST_ID,
    PLACE_BITS,
    Ids,
    PromptImage,
)


class ImageStore:
    """Embeddings of the images of running requests, on a rank of the first stage.

    ``encode(pixels [t, 3, H, W], sizes)`` returns the rows [n, h]; collective over the
    tensor-parallel group; see `GenerationModel`.  An image is encoded when a step first has rows of
    it: never if the prefix cache has all.  ``weight_version()`` changes with the weights, which
    makes embeddings old.
    """

    def __init__(
        self,
        encode: Callable[[Tensor, Tensor | None], Tensor],
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
            sizes = torch.tensor([image.size], device=self._device) if image.size else None
            pixels = torch.from_numpy(image.pixels).to(self._device)
            self._rows[key] = self._encode(pixels, sizes)
            assert len(self._rows[key]) == image.num_rows, "the ids have been counted"
        return self._rows[key]
