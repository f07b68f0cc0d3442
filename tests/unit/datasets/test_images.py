"""Images: decoding, tiling and pixel values, compared with transformers' Pillow processors."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets import images
from megatron.core.datasets.images import (
    ImageSettings,
    decode_image,
    patches_of,
    size_of_image,
)
from tests.support.transformers_release import need_tested_release

Image = pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")
SIZES = [(640, 480), (480, 640), (33, 47), (1, 1), (1000, 90), (90, 1000), (448, 448), (5, 700)]


def picture(width: int, height: int, mode: str = "RGB") -> Any:
    """Waves of color with noise, in any mode."""
    y, x = np.mgrid[:height, :width]
    random = np.random.default_rng(width * 7919 + height)
    noise = random.integers(0, 60, (height, width, 4))
    waves = [np.sin(x / 9) * 90 + 100, np.cos(y / 7) * 90 + 100, (x + y) % 190, (x * y) % 190]
    pixels = (np.stack(waves, -1) + noise).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def expected_pixels(name: str, image: Any, **options: Any) -> np.ndarray:
    """Pixel values of transformers' Pillow processor."""
    processor = getattr(transformers, name)(**options)
    return np.concatenate([np.atleast_3d(processor(image)["pixel_values"])]).astype(np.float32)


class TestPixelValues:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.feature("Data: pixel values bitwise equal to transformers' image processors")
    def test_clip_scales_the_shorter_side_and_crops(self, size: tuple[int, int]) -> None:
        image = picture(*size)
        settings = ImageSettings(img_h=64, img_w=64, vision_model_type="clip", fit="crop")
        theirs = expected_pixels(
            "CLIPImageProcessorPil",
            image,
            size={"shortest_edge": 64},
            crop_size={"height": 64, "width": 64},
        )
        assert np.array_equal(settings.process(image), theirs)

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize(
        ("kind", "name"),
        [
            ("siglip", "SiglipImageProcessorPil"),
            ("vit", "ViTImageProcessorPil"),
            ("gemma3", "Gemma3ImageProcessorPil"),
        ],
    )
    def test_siglip_vit_and_gemma3_stretch(
        self, size: tuple[int, int], kind: str, name: str
    ) -> None:
        image = picture(*size)
        settings = ImageSettings(img_h=48, img_w=80, vision_model_type=kind)
        theirs = expected_pixels(name, image, size={"height": 48, "width": 80})
        assert np.array_equal(settings.process(image), theirs)

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("max_num_tiles", [1, 6, 12])
    def test_internvl_tiles_with_thumbnail(self, size: tuple[int, int], max_num_tiles: int) -> None:
        image = picture(*size)
        settings = ImageSettings(
            img_h=56,
            img_w=56,
            vision_model_type="internvit",
            tiling="dynamic",
            max_num_tiles=max_num_tiles,
            use_thumbnail=True,
        )
        theirs = expected_pixels(
            "GotOcr2ImageProcessorPil",
            image,
            size={"height": 56, "width": 56},
            crop_to_patches=True,
            max_patches=max_num_tiles,
            image_mean=[0.485, 0.456, 0.406],
            image_std=[0.229, 0.224, 0.225],
        )
        ours = settings.process(image)
        assert np.array_equal(ours, theirs)
        assert settings.num_tiles(*size) == len(ours)

    @pytest.mark.parametrize("size", [s for s in SIZES if s != (5, 700)])
    def test_llava_next_pads_to_the_best_resolution(self, size: tuple[int, int]) -> None:
        image = picture(*size)
        grids = ((24, 48), (48, 24), (48, 48), (72, 24), (24, 72))
        settings = ImageSettings(img_h=24, img_w=24, fit="crop", tiling="anyres", resolutions=grids)
        theirs = expected_pixels(
            "LlavaNextImageProcessorPil",
            image,
            size={"shortest_edge": 24},
            crop_size={"height": 24, "width": 24},
            image_grid_pinpoints=[list(grid) for grid in grids],
        )[0]
        ours = settings.process(image)
        assert np.array_equal(ours, theirs)
        assert settings.num_tiles(*size) == len(ours)

    @pytest.mark.parametrize("size", [s for s in SIZES if s != (5, 700)])
    def test_qwen2_vl_makes_patches_of_images_of_any_size(self, size: tuple[int, int]) -> None:
        image = picture(*size)
        settings = ImageSettings(
            img_h=56, img_w=84, vision_model_type="qwen2_vl", tiling="patches", patch_dim=7
        )
        theirs = expected_pixels(
            "Qwen2VLImageProcessorPil",
            image,
            patch_size=7,
            size={"shortest_edge": 4 * 14**2, "longest_edge": 56 * 84},
        )
        ours = settings.process(image)
        assert np.array_equal(ours.reshape(-1, ours.shape[-1]), theirs[..., 0])
        assert settings.num_tiles(*size) == len(ours)
        assert ours.shape[1:] == settings.tile_shape

    @pytest.mark.parametrize("size", [s for s in SIZES if s != (5, 700)])
    def test_qwen3_vl_magnifies_small_images(self, size: tuple[int, int]) -> None:
        image = picture(*size)
        settings = ImageSettings(
            img_h=80, img_w=160, vision_model_type="qwen3_vl", tiling="patches", patch_dim=4
        )
        theirs = expected_pixels(
            "Qwen2VLImageProcessorPil",
            image,
            patch_size=4,
            size={"shortest_edge": 64 * 8**2, "longest_edge": 80 * 160},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        )
        ours = settings.process(image)
        assert np.array_equal(ours.reshape(-1, ours.shape[-1]), theirs[..., 0])

    @pytest.mark.parametrize("size", [s for s in SIZES if s != (5, 700)])
    def test_pixtral_covers_the_image_with_blocks(self, size: tuple[int, int]) -> None:
        image = picture(*size)
        settings = ImageSettings(
            img_h=48, img_w=48, vision_model_type="pixtral", tiling="patches", patch_dim=4
        )
        theirs = expected_pixels(
            "PixtralImageProcessorPil", image, patch_size=8, size={"longest_edge": 48}
        )[0]
        ours = settings.process(image)
        assert np.array_equal(ours, patches_of(theirs, 4, 1))
        rows = theirs.shape[1] // 8
        assert settings.num_positions(*size, 1) == len(ours) + rows

    @pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "CMYK"])
    def test_images_of_any_mode(self, mode: str) -> None:
        if mode in ("RGBA", "LA"):
            need_tested_release("transparent pixels have other colors")
        image = picture(40, 30, mode)
        settings = ImageSettings(img_h=32, img_w=32, vision_model_type="siglip")
        theirs = expected_pixels("SiglipImageProcessorPil", image, size={"height": 32, "width": 32})
        assert np.array_equal(settings.process(image), theirs)


class TestDecoding:
    @pytest.mark.parametrize(
        ("kind", "mode"),
        [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "P"), ("PNG", "LA")]
        + [("GIF", "P"), ("WEBP", "RGBA"), ("BMP", "RGB"), ("TIFF", "CMYK"), ("PPM", "RGB")],
    )
    def test_files_become_rgb(self, kind: str, mode: str) -> None:
        decoded = decode_image(encoded(picture(20, 10, mode), kind), "a")
        assert (decoded.mode, decoded.size) == ("RGB", (20, 10))

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_the_exif_orientation_is_applied(self, orientation: int) -> None:
        image = picture(20, 10)
        exif = Image.Exif()
        exif[0x0112] = orientation
        turns = [None, "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE"]
        turns += ["ROTATE_270", "TRANSVERSE", "ROTATE_90"]
        turn = turns[orientation - 1]
        shown = image.transpose(getattr(Image.Transpose, turn)) if turn else image
        decoded = decode_image(encoded(image, exif=exif), "a")
        assert np.array_equal(np.asarray(decoded), np.asarray(shown))

    def test_transparent_pixels_are_white(self) -> None:
        pixels = np.zeros((2, 2, 4), np.uint8)
        pixels[0, 0] = (10, 20, 30, 255)
        decoded = np.asarray(decode_image(encoded(Image.fromarray(pixels)), "a"))
        assert decoded[0, 0].tolist() == [10, 20, 30]
        assert (decoded[1] == 255).all()

    def test_a_transparent_color_of_a_palette_is_white(self) -> None:
        image = Image.new("P", (2, 1))
        image.putpalette([0, 0, 0, 9, 9, 9])
        image.putpixel((1, 0), 1)
        decoded = np.asarray(decode_image(encoded(image, transparency=0), "a"))
        assert decoded[0].tolist() == [[255] * 3, [9] * 3]

    def test_16_bit_grey_keeps_its_upper_bits(self) -> None:
        values = np.array([[0, 255, 256, 30000, 65535]], np.uint16)
        decoded = np.asarray(decode_image(encoded(Image.fromarray(values)), "a"))
        assert decoded[0, :, 0].tolist() == [0, 0, 1, 117, 255]

    def test_pixels_without_a_range_are_refused(self) -> None:
        data = encoded(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF")
        with pytest.raises(DataError, match="^shard, sample 7: .*mode F"):
            decode_image(data, "shard, sample 7")

    def test_every_truncation_is_refused_or_complete(self) -> None:
        for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"):
            data = encoded(picture(40, 30), kind)
            for length in range(0, len(data) * 3 // 4, max(1, len(data) // 60)):
                with pytest.raises(DataError, match="^a: "):
                    decode_image(data[:length], "a")

    def test_flipped_bytes_raise_only_data_errors(self) -> None:
        random = np.random.default_rng(3)
        for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "AVIF"):
            data = encoded(picture(24, 16), kind)
            for _ in range(40):
                damaged = bytearray(data)
                for at in random.integers(0, min(len(data), 400), 3):
                    damaged[at] = random.integers(256)
                with contextlib.suppress(DataError):
                    decode_image(bytes(damaged), "a", max_pixels=1 << 16)

    def test_large_images_are_refused_before_they_are_decoded(self) -> None:
        data = encoded(Image.new("1", (30000, 20000)))
        assert len(data) < 100_000
        for read in (decode_image, size_of_image):
            with pytest.raises(DataError, match="^a: no image .*DecompressionBombError"):
                read(data, "a")
            with pytest.raises(DataError, match="^a: an image of 13000 x 12000 pixels, at most"):
                read(encoded(Image.new("1", (13000, 12000))), "a")
        with pytest.raises(DataError, match="^a: an image of 20 x 10 pixels, at most 199"):
            decode_image(encoded(picture(20, 10)), "a", max_pixels=199)

    def test_a_jpeg_of_many_scans_is_refused(self) -> None:
        data = encoded(picture(20, 10), "JPEG", progressive=True)
        assert decode_image(data, "a").size == (20, 10)
        last = data[data.rindex(b"\xff\xda") : -2]
        with pytest.raises(DataError, match="^a: a JPEG of more than 100 scans"):
            decode_image(data[:-2] + 100 * last + data[-2:], "a")

    def test_long_thin_images_are_refused_before_they_are_scaled(self) -> None:
        settings = ImageSettings(img_h=64, img_w=64, fit="crop", max_pixels=1 << 20)
        with pytest.raises(DataError, match="^b: .*1 x 1000 pixels becomes 64 x 64000"):
            settings.process(Image.new("RGB", (1, 1000)), "b")

    @pytest.mark.parametrize("data", [b"", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg/>"])
    def test_other_files_are_refused(self, data: bytes) -> None:
        with pytest.raises(DataError, match="^a: no image"):
            decode_image(data, "a")


class TestGrids:
    def test_all_grids_up_to_a_number_of_tiles(self) -> None:
        expected = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1)]
        assert images.grids(4) == tuple(expected)

    def test_of_equally_close_grids_the_pixels_decide(self) -> None:
        tile = (100, 100)
        assert images.closest_grid((140, 140), tile, 4) == (1, 1)
        assert images.closest_grid((142, 142), tile, 4) == (2, 2)

    def test_area_weighted_grids_prefer_larger_grids_for_large_images(self) -> None:
        tile = (100, 100)
        # 1.5 is closest to 3 x 2; where few tiles are enough, 2 x 1 has the better product.
        assert images.closest_grid((1200, 800), tile, 12) == (3, 2)
        assert images.area_weighted_grid((1200, 800), tile, 12) == (4, 3)
        assert images.area_weighted_grid((100, 100), tile, 12) == (1, 1)

    def test_an_extreme_image_has_a_resolution(self) -> None:
        assert images.best_resolution((1, 5000), images.LLAVA_NEXT_GRIDS) == (336, 672)
        assert images.size_within((1, 5000), (336, 672)) == (1, 336)

    def test_tags_of_tiles(self) -> None:
        assert images.tile_tags(1, False) == ["<tile_1>"]
        assert images.tile_tags(3, True) == ["<tile_1>", "<tile_2>", "<tile_global_thumbnail>"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_model_type": "resnet"}, "--vision-model-type resnet"),
        ({"fit": "crop", "img_w": 40}, "--img-w 40"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ImageSettings(**({"img_h": 336, "img_w": 336} | changes))
