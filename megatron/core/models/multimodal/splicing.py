"""Put the embeddings of images into the places that a text has for them.

``b`` rows, ``s`` tokens of a row, of which some stand for an image; ``L`` positions of a row in
which each of these is replaced by the embeddings of its image.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

IGNORE_INDEX = -100  # label of a position that predicts nothing


@dataclass(frozen=True)
class Splice:
    """Where each position of a row comes from; made by `splice`.

    ``token`` [b, L]: the token at a position or whose image is there; ``is_image`` and ``is_text``
    [b, L]: neither is true behind the end of a row.  ``image_row`` [b, L]: row of its embedding
    among those of all images.  ``offset`` [b, L]: index of a position among those of its token.
    ``is_before_image`` [b, s].
    """

    token: Tensor
    is_image: Tensor
    is_text: Tensor
    image_row: Tensor
    offset: Tensor
    is_before_image: Tensor

    def embeddings(self, text: Tensor, images: Tensor) -> Tensor:
        """Merge text [b, s, h] and all images' embeddings [n, h] to [b, L, h]."""
        places = self.token.unsqueeze(-1).expand(-1, -1, text.shape[-1])
        out = text.gather(1, places) * self.is_text.unsqueeze(-1)
        if not len(images):
            return out
        found = images[self.image_row.clamp(max=len(images) - 1)]
        return torch.where(self.is_image.unsqueeze(-1), found.to(out.dtype), out)

    def labels(self, labels: Tensor) -> Tensor:
        """Spread labels [b, s] to [b, L]; positions of images and padding predict nothing."""
        return labels.gather(1, self.token).masked_fill(~self.is_text, IGNORE_INDEX)

    def loss_mask(self, mask: Tensor) -> Tensor:
        """Spread a mask [b, s] to [b, L].  What would predict an image counts as 0 too."""
        return (mask * ~self.is_before_image).gather(1, self.token) * self.is_text

    def grid_positions(self, sizes: Tensor) -> Tensor:
        """Return time, height and width of each position, for M-RoPE: [3, b, L].

        ``sizes`` [b, s, 3]: embeddings of the image at a token along time, height and width, whose
        product is its count; zeros at text.  All three are the same at a text token, which comes
        as far behind an image as the image is high or wide.
        """
        _, height, width = sizes.unbind(-1)
        steps = torch.maximum(height, width).clamp(min=1)
        start = (steps.cumsum(1) - steps).gather(1, self.token)
        rows, columns = (each.gather(1, self.token).clamp(min=1) for each in (height, width))
        in_frame = self.offset % (rows * columns)
        frame = self.offset // (rows * columns)
        within = torch.stack([frame, in_frame // columns, in_frame % columns])
        return start + within * self.is_image


def decoder_inputs(rows: Tensor, width: int) -> tuple[Tensor, dict[str, object]]:
    """Split [L, b, (1 + k) h] into embeddings [L, b, h] and further arguments of the decoder.

    The other k parts are added to the hidden states after each of the first k layers (DeepStack).
    """
    first, *others = rows.split(width, -1)
    visit = {layer: partial(torch.add, part) for layer, part in enumerate(others)}
    return first.contiguous(), {"visit": visit} if visit else {}


def value_of_image(is_image: Tensor, values: Tensor) -> Tensor:
    """Return the row of ``values`` [images, ...] of the image at each token [b, s]; 0 at text."""
    values = torch.cat([values.new_zeros(1, *values.shape[1:]), values]).to(is_image.device)
    number = is_image.flatten().cumsum(0).view_as(is_image).clamp(max=len(values) - 1)
    return values[number * is_image]


def splice(is_image: Tensor, counts: Tensor, length: int | None = None) -> Splice:
    """Return where tokens and images of rows [b, s] go.

    ``counts`` [b, s]: embeddings of the image that a token stands for.  ``length``: L; longer rows
    are cut.  The default is that of the longest row, for which the host waits for the device.
    """
    num_tokens = is_image.shape[1]
    ends = torch.where(is_image, counts, 1).cumsum(1)
    if length is None:
        length = int(ends[:, -1].max())
    positions = torch.arange(length, device=ends.device).expand(len(ends), -1).contiguous()
    token = torch.searchsorted(ends, positions, right=True)
    is_inside = token < num_tokens
    token = token.clamp(max=num_tokens - 1)
    starts = ends - torch.where(is_image, counts, 1)
    has_image = is_image.gather(1, token) & is_inside
    in_row = (counts * is_image).sum(1)
    first = in_row.cumsum(0) - in_row  # row of the first image's embedding, of each row of text
    before = torch.zeros_like(is_image)
    before[:, :-1] = is_image[:, 1:]
    return Splice(
        token=token,
        is_image=has_image,
        is_text=is_inside & ~has_image,
        image_row=(first[:, None] + has_image.cumsum(1) - 1).clamp(min=0),
        offset=positions - starts.gather(1, token),
        is_before_image=before,
    )
