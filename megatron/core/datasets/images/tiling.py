"""Choose the grid of tiles into which an image is divided.

A grid is (columns, rows).  All choices depend only on the size of the image in pixels.
"""

from __future__ import annotations

import math
from functools import cache

# Grids of LLaVA-NeXT in pixels (height, width), for tiles of 336 x 336.
LLAVA_NEXT_GRIDS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_MOST_MAGNIFICATION = 0.6  # share of an image's area beyond which a larger grid gains nothing


@cache
def grids(max_num_tiles: int) -> tuple[tuple[int, int], ...]:
    """Return all grids of 1 to ``max_num_tiles`` tiles, smallest first."""
    sides = range(1, max_num_tiles + 1)
    fitting = [(x, y) for x in sides for y in sides if x * y <= max_num_tiles]
    return tuple(sorted(fitting, key=lambda grid: grid[0] * grid[1]))


def closest_grid(
    size: tuple[int, int], tile: tuple[int, int], max_num_tiles: int
) -> tuple[int, int]:
    """Return the grid whose number of columns per row is closest to width / height (InternVL).

    ``size`` and ``tile`` are (width, height) in pixels.  Of equally close grids, such as 1 x 1 and
    2 x 2, the largest wins of which the image has more than half of the pixels.
    """
    width, height = size
    best = (1, 1)
    best_difference = math.inf
    for grid in grids(max_num_tiles):
        difference = abs(width / height - grid[0] / grid[1])
        has_pixels = width * height > 0.5 * tile[0] * tile[1] * grid[0] * grid[1]
        if difference < best_difference or (difference == best_difference and has_pixels):
            best = grid
            best_difference = difference
    return best


def area_weighted_grid(
    size: tuple[int, int], tile: tuple[int, int], max_num_tiles: int
) -> tuple[int, int]:
    """Return the grid with the best product of area and aspect ratio.

    Area counts up to 0.6 of the image, aspect ratio as the smaller of both divided by the larger.
    """
    width, height = size

    def merit(grid: tuple[int, int]) -> float:
        area = grid[0] * grid[1] * tile[0] * tile[1] / (width * height)
        ratio = grid[0] / grid[1] / (width / height)
        return min(area, _MOST_MAGNIFICATION) * min(ratio, 1 / ratio)

    return max(grids(max_num_tiles), key=merit)  # the first of equals


def best_resolution(
    size: tuple[int, int], resolutions: tuple[tuple[int, int], ...]
) -> tuple[int, int]:
    """Return the (height, width) of ``resolutions`` that keeps most pixels (LLaVA-NeXT).

    The image of ``size`` (width, height) is scaled to fit.  Among equals the smallest wins.
    """
    width, height = size

    def merit(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=merit)


def size_within(size: tuple[int, int], resolution: tuple[int, int]) -> tuple[int, int]:
    """Return (width, height) of an image scaled, with its aspect ratio, to fit ``resolution``."""
    width, height = size
    to_height, to_width = resolution
    by_width = to_width / width
    by_height = to_height / height
    if by_width < by_height:
        return to_width, min(math.ceil(height * by_width), to_height)
    return min(math.ceil(width * by_height), to_width), to_height


def tile_tags(num_tiles: int, ends_with_whole_image: bool) -> list[str]:
    """Return NVLM's tags, which precede the tiles of an image as text, in their order."""
    tags = [f"<tile_{number}>" for number in range(1, num_tiles + 1)]
    if ends_with_whole_image:
        tags[-1] = "<tile_global_thumbnail>"
    return tags
