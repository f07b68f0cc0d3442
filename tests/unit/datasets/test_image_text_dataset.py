"""Samples of text and images: their tensors, their order, and samples that cannot be used."""

from __future__ import annotations

import io
import itertools
import json
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.image_text_dataset import ImageTextDataset, ImageTextDatasetConfig
from megatron.core.datasets.images import ImageSettings
from megatron.core.datasets.samplers import DataLoaderConfig, build_data_loader
from tests.unit.datasets.test_tar_shards import write_tar

Image = pytest.importorskip("PIL.Image")
PAD = 0
IMAGE = 1
END = 2
_WORD = re.compile(r"<image>|\w+|[^\w\s]")


class WordTokenizer:
    """As much of a MultimodalTokenizer as the dataset asks for: one id per word."""

    pad = PAD

    def __init__(self) -> None:
        self.words: dict[str, int] = {"<pad>": PAD, "<image>": IMAGE, "</s>": END}
        self.unique_identifiers = OrderedDict[str, Any]({"class": "WordTokenizer"})

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.words[token]

    def tokenize_plain(self, text: str) -> list[int]:
        return [self.words.setdefault(w, len(self.words)) for w in _WORD.findall(text)]

    def tokenize_conversation(
        self, turns: Sequence[dict[str, str]], return_target: bool, add_generation_prompt: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        assert return_target
        assert not add_generation_prompt
        ids: list[int] = []
        target: list[int] = []
        for turn in turns:
            if not turn["content"]:
                raise DataError(f"a turn of the {turn['role']} is empty")
            text = [*self.tokenize_plain(turn["content"]), END]
            ids += text
            target += text if turn["role"] == "assistant" else [-100] * len(text)
        return np.array(ids), np.array(target)

    def text(self, ids: Any) -> list[str]:
        names = {i: word for word, i in self.words.items()} | {-200: "IMAGE"}
        return [names[i] for i in np.asarray(ids).tolist()]


def png(width: int = 8, height: int = 8, seed: int = 0) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def talk(*contents: str) -> bytes:
    """The .json of turns that alternate between human and assistant."""
    speakers = itertools.cycle(("human", "gpt"))
    turns = [{"from": by, "value": text} for by, text in zip(speakers, contents, strict=False)]
    return json.dumps({"conversations": turns}).encode()


def config(**changes: Any) -> ImageTextDatasetConfig:
    given: dict[str, Any] = {
        "random_seed": 1234,
        "sequence_length": 12,
        "blend": (["p"], None),
        "split": "1",
        "tokenizer": WordTokenizer(),
        "images": ImageSettings(img_h=4, img_w=4),
    }
    if "blend_per_split" in changes:
        given.update(blend=None, split=None)
    return ImageTextDatasetConfig(**(given | changes))


def dataset(path: str, num_samples: int | None = None, **changes: Any) -> ImageTextDataset:
    built = BlendedMegatronDatasetBuilder(
        ImageTextDataset, [num_samples, 0, 0], lambda: True, config(blend=([path], None), **changes)
    ).build()
    assert isinstance(built[0], ImageTextDataset)
    return built[0]


def one(tmp_path: Path, *files: tuple[str, bytes], **changes: Any) -> tuple[dict[str, Any], Any]:
    """The tensors of a shard with one sample, and the tokenizer."""
    given = {"broken_samples": "fail"} | changes
    built = dataset(write_tar(tmp_path / "one.tar", files), **given)
    return built[0], built.config.tokenizer


class TestTensors:
    def test_a_conversation_with_an_image(self, tmp_path: Path) -> None:
        image = png()
        files = ("a.png", image), ("a.json", talk("<image> what?", "a cat", "sure?", "yes"))
        sample, tokenizer = one(tmp_path, *files)
        text = tokenizer.text(sample["tokens"])
        expected = "IMAGE what ? </s> a cat </s> sure ? </s> yes </s>".split()
        assert text == expected
        has_loss = sample["loss_mask"].bool()
        assert tokenizer.text(sample["labels"][has_loss]) == "a cat </s> yes </s>".split()
        assert has_loss.nonzero().flatten().tolist() == [3, 4, 5, 9, 10]
        assert sample["num_tiles"].tolist() == [1] + [0] * 11
        assert sample["position_ids"].tolist() == list(range(12))
        pixels = ImageSettings(img_h=4, img_w=4).read(image, "a")[0]
        assert np.array_equal(sample["images"].numpy(), pixels)
        kinds = {name: (str(t.dtype)[6:], tuple(t.shape)) for name, t in sample.items()}
        ids = ("int64", (12,))
        assert kinds == {
            "tokens": ids,
            "labels": ids,
            "position_ids": ids,
            "num_tiles": ids,
            "loss_mask": ("float32", (12,)),
            "images": ("float32", (1, 3, 4, 4)),
        }

    @pytest.mark.parametrize(
        "record",
        [
            {"texts": [{"from": "human", "value": "<image> q"}, {"from": "gpt", "value": "a b"}]},
            {"texts": [{"user": "<image> q", "assistant": "a b"}]},
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]},
                    {"role": "assistant", "content": "a b"},
                ]
            },
            {"caption": "a b"},
            {"text": "a b"},
        ],
    )
    def test_other_records(self, tmp_path: Path, record: dict[str, Any]) -> None:
        files = ("a.png", png()), ("a.json", json.dumps(record).encode())
        sample, tokenizer = one(tmp_path, *files, caption_prompt="q")
        assert tokenizer.text(sample["tokens"])[:6] == "IMAGE q </s> a b </s>".split()
        assert sample["loss_mask"].sum() == 3

    def test_answers_weigh_by_the_root_of_their_length(self, tmp_path: Path) -> None:
        files = ("a.png", png()), ("a.json", talk("<image> what?", "a cat", "sure?", "yes"))
        sample, _ = one(tmp_path, *files, weighs_answers=True)
        weights = sample["loss_mask"]
        third = 3**-0.5
        half = 2**-0.5
        assert weights.tolist() == pytest.approx([0, 0, 0, *[third] * 3, 0, 0, 0, half, half, 0])

    def test_the_name_of_a_sample_chooses_its_question(self, tmp_path: Path) -> None:
        files = [(f"{n}.txt", b"a") for n in range(8)]
        shard = write_tar(
            tmp_path / "many.tar",
            [f for n, text in files for f in ((n[0] + ".png", png()), (n, text))],
        )
        built = dataset(shard, broken_samples="fail", caption_prompts=("q", "what"))
        words = built.config.tokenizer.text
        asked = [words(built[i]["tokens"])[1] for i in range(8)]
        assert set(asked) == {"q", "what"}
        again = dataset(shard, broken_samples="fail", caption_prompts=("q", "what"))
        assert [words(again[i]["tokens"])[1] for i in range(8)] == asked

    def test_a_text_file_is_a_caption(self, tmp_path: Path) -> None:
        sample, tokenizer = one(tmp_path, ("a.png", png()), ("a.txt", b"a b\n"))
        assert tokenizer.text(sample["tokens"])[:5] == "IMAGE </s> a b </s>".split()

    def test_text_without_images(self, tmp_path: Path) -> None:
        sample, tokenizer = one(tmp_path, ("a.json", talk("what?", "that")))
        assert tokenizer.text(sample["tokens"])[:5] == "what ? </s> that </s>".split()
        assert sample["images"].shape == (0, 3, 4, 4)
        assert (sample["num_tiles"] <= 0).all()
        plain, _ = one(tmp_path, ("a.txt", b"only text"))
        assert plain["loss_mask"].sum() == 2

    def test_tiles_of_several_images(self, tmp_path: Path) -> None:
        tiled = ImageSettings(
            img_h=4, img_w=4, tiling="dynamic", max_num_tiles=4, use_thumbnail=True
        )
        files = ("a.0.png", png(24, 8)), ("a.1.png", png(5, 5)), ("a.2.png", png(8, 32))
        text = talk("<image> <image> or <image>", "first")
        sample, _ = one(tmp_path, *files, ("a.json", text), images=tiled)
        assert sample["num_tiles"].tolist()[:5] == [4, 1, 0, 5, 0]
        pixels = [tiled.read(data, "a")[0] for _, data in files]
        assert np.array_equal(sample["images"].numpy(), np.concatenate(pixels))

    def test_tile_tags_are_text_around_tokens_of_one_tile(self, tmp_path: Path) -> None:
        tiled = ImageSettings(
            img_h=4, img_w=4, tiling="dynamic", max_num_tiles=4, use_thumbnail=True
        )
        files = ("a.0.png", png(16, 8)), ("a.1.png", png(4, 4))
        text = talk("see <image> and <image>", "yes")
        options = {"images": tiled, "use_tile_tags": True, "sequence_length": 24}
        sample, tokenizer = one(tmp_path, *files, ("a.json", text), **options)
        words = tokenizer.text(sample["tokens"])
        joined = "".join(words).replace("<pad>", "")
        assert joined == (
            "see<tile_1>IMAGE<tile_2>IMAGE<tile_global_thumbnail>IMAGE"
            "and<tile_global_thumbnail>IMAGE</s>yes</s>"
        )
        is_image = sample["tokens"] == -200
        assert (sample["num_tiles"].clamp(min=0) == is_image.long()).all()
        assert len(sample["images"]) == 4
        has_loss = sample["loss_mask"].bool()
        assert tokenizer.text(sample["labels"][has_loss]) == ["yes", "</s>"]

    def test_images_in_an_answer_carry_no_loss(self, tmp_path: Path) -> None:
        files = ("a.png", png()), ("a.json", talk("draw", "here <image> it is"))
        sample, tokenizer = one(tmp_path, *files)
        has_loss = sample["loss_mask"].bool()
        assert tokenizer.text(sample["labels"][has_loss]) == ["here", "it", "is", "</s>"]

    @pytest.mark.parametrize(("length", "num_images"), [(4, 1), (5, 1), (6, 2), (12, 2)])
    def test_cut_text_keeps_tokens_and_tiles_together(
        self, tmp_path: Path, length: int, num_images: int
    ) -> None:
        files = ("a.0.png", png(seed=1)), ("a.1.png", png(seed=2))
        text = talk("<image>", "a cat", "<image>", "a dog")
        sample, _ = one(tmp_path, *files, ("a.json", text), sequence_length=length)
        assert (sample["tokens"] == -200).sum() == num_images == len(sample["images"])
        assert sample["num_tiles"].clamp(min=0).sum() == num_images

    def test_the_row_of_the_language_model_limits_images(self, tmp_path: Path) -> None:
        files = ("a.0.png", png(seed=1)), ("a.1.png", png(seed=2))
        text = talk("<image>", "a cat", "<image>", "a dog")
        budget = {"embeddings_per_tile": 10, "sequence_length": 20}
        lengths = {13: (4, 1), 14: (5, 1), 23: (5, 1), 24: (6, 2), 40: (10, 2)}
        for limit, (num_tokens, num_images) in lengths.items():
            limited = budget | {"decoder_sequence_length": limit}
            sample, _ = one(tmp_path, *files, ("a.json", text), **limited)
            assert (sample["tokens"] != PAD).sum() == num_tokens
            assert len(sample["images"]) == num_images


def numbered(path: Path, first: int, count: int) -> str:
    """A shard of samples without images that answer with their number."""
    files = [(f"{n}.json", talk("n", str(n))) for n in range(first, first + count)]
    return write_tar(path, files)


def answer(sample: dict[str, Any], tokenizer: WordTokenizer) -> int:
    """The number that a sample of `numbered` answers with."""
    return int(tokenizer.text(sample["tokens"][2:3])[0])


def answers(built: Any, tokenizer: WordTokenizer | None = None) -> list[int]:
    known = tokenizer or built.config.tokenizer
    return [answer(built[i], known) for i in range(len(built))]


class TestOrder:
    def test_each_epoch_has_every_sample_in_another_order(self, tmp_path: Path) -> None:
        path = numbered(tmp_path / "s.tar", 0, 50)
        found = answers(dataset(path, 150))
        epochs = [found[:50], found[50:100], found[100:]]
        assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]
        assert found == answers(dataset(path, 150))
        assert found[:70] == answers(dataset(path, 70))
        assert found != answers(dataset(path, 150, random_seed=5))

    def test_a_split_divides_samples(self, tmp_path: Path) -> None:
        path = numbered(tmp_path / "s.tar", 0, 20)
        asked = config(blend=([path], None), split="70,20,10")
        built = BlendedMegatronDatasetBuilder(
            ImageTextDataset, [None, None, None], lambda: True, asked
        ).build()
        found = [set(answers(d)) for d in built]
        assert found == [set(range(14)), set(range(14, 18)), {18, 19}]

    def test_a_blend_takes_samples_by_weight(self, tmp_path: Path) -> None:
        paths = [numbered(tmp_path / f"{i}.tar", 100 * i, 10) for i in range(2)]
        asked = config(blend=(paths, [3.0, 1.0]), path_to_cache=str(tmp_path / "cache"))
        train = BlendedMegatronDatasetBuilder(
            ImageTextDataset, [80, 0, 0], lambda: True, asked
        ).build()[0]
        found = [answer(train[i], asked.tokenizer) for i in range(80)]
        counts = Counter(n // 100 for n in found)
        assert counts == {0: 60, 1: 20}
        assert set(found) == {*range(10), *range(100, 110)}

    @pytest.mark.feature("Data: image-text samples resume exactly on another number of ranks")
    def test_a_resumed_run_on_other_ranks_reads_the_next_samples(self, tmp_path: Path) -> None:
        built = dataset(numbered(tmp_path / "s.tar", 0, 333), 12000)
        expected = [built._order[i] for i in range(10400)]

        def stream(consumed: int, count: int, size: int) -> list[int]:
            loaders = [
                build_data_loader(
                    built,
                    consumed,
                    DataLoaderConfig(
                        micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=size
                    ),
                ).batch_sampler
                for rank in range(size)
            ]
            steps = zip(*map(iter, loaders), strict=True)
            numbers = itertools.chain.from_iterable(itertools.chain(*step) for step in steps)
            return [built._order[n] for n in itertools.islice(numbers, count)]

        assert stream(0, 400, 2) == expected[:400]
        assert stream(400, 10000, 5) == expected[400:]
        sample = built[400]
        assert answer(sample, built.config.tokenizer) == expected[400]

    def test_a_loader_joins_the_tiles_of_its_samples(self, tmp_path: Path) -> None:
        files = [("0.json", talk("n", "0")), ("1.png", png()), ("1.json", talk("<image>", "1"))]
        files += [("2.0.png", png()), ("2.1.png", png())]
        files += [("2.json", talk("<image><image>", "2"))]
        built = dataset(write_tar(tmp_path / "s.tar", files), 6)
        wanted = DataLoaderConfig(micro_batch_size=3, joined=("images",))
        for batch in build_data_loader(built, 0, wanted):
            assert batch["tokens"].shape == (3, 12)
            assert batch["images"].shape == (3, 3, 4, 4)
            assert batch["num_tiles"].clamp(min=0).sum() == 3

    def test_none_is_a_sample_without_loss(self, tmp_path: Path) -> None:
        built = dataset(numbered(tmp_path / "s.tar", 0, 3))
        assert not built[None]["loss_mask"].any()
        with pytest.raises(IndexError):
            built[3]


GOOD = ("good.json", talk("n", "7"))
BROKEN = {
    "truncated": ([("bad.png", png()[:60]), ("bad.json", talk("<image>", "x"))], "image 0: no im"),
    "no_image": ([("bad.png", b""), ("bad.json", talk("<image>", "x"))], "image 0: no image"),
    "too_few": ([("bad.png", png()), ("bad.json", talk("hm", "x"))], "0 <image> for 1 images"),
    "too_many": ([("bad.json", talk("<image>", "x"))], "1 <image> for 0 images"),
    "no_text": ([("bad.png", png())], r"no \.json and no \.txt"),
    "no_json": ([("bad.json", b"{")], r"its \.json: it is no JSON"),
    "a_list": ([("bad.json", b"[]")], r"its \.json: it is \[\], not an object"),
    "no_key": ([("bad.json", b'{"url": 1}')], "none of conversations, texts"),
    "no_turns": ([("bad.json", b'{"texts": ["a"]}')], "needs a role"),
    "no_caption": ([("bad.json", b'{"caption": null}')], "its caption is None"),
    "speaker": (
        [("bad.json", b'{"texts": [{"from": "dog", "value": ""}]}')],
        "needs a role of system, user",
    ),
    "value": (
        [("bad.json", b'{"texts": [{"from": "gpt", "value": 3}]}')],
        "is 3; it must",
    ),
    "part": (
        [("bad.json", b'{"messages": [{"role": "user", "content": [1]}]}')],
        "parts must be",
    ),
    "empty": ([("bad.json", talk("", "x"))], "turn of the user is empty"),
    "late": ([("bad.json", talk("word " * 30, "x"))], "no token of an answer is within the first"),
    "mode": ([("bad.tif", b""), ("bad.json", talk("<image>", "x"))], "image 0: no image"),
}


class TestBrokenSamples:
    @pytest.mark.parametrize("name", BROKEN)
    def test_a_broken_sample_is_replaced_counted_and_logged_once(
        self, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        files, reason = BROKEN[name]
        built = dataset(write_tar(tmp_path / "s.tar", [*files, GOOD]), 20)
        with caplog.at_level(logging.WARNING):
            assert answers(built) == [7] * 20
        assert built.num_broken == 1
        logged = [r.getMessage() for r in caplog.records if "another sample" in r.getMessage()]
        assert len(logged) == 1
        assert re.search(rf"s\.tar, sample bad.*{reason}", logged[0])

    @pytest.mark.parametrize("name", BROKEN)
    def test_or_it_ends_the_run(self, tmp_path: Path, name: str) -> None:
        files, reason = BROKEN[name]
        built = dataset(write_tar(tmp_path / "s.tar", files), 1, broken_samples="fail")
        with pytest.raises(DataError, match=rf"s\.tar, sample bad.*{reason}.*--broken-samples"):
            built[0]

    def test_replacements_depend_on_the_number_only(self, tmp_path: Path) -> None:
        files = [(f"{n}.json", talk("n", str(n)) if n % 3 else b"{") for n in range(60)]
        path = write_tar(tmp_path / "s.tar", files)
        found = answers(dataset(path, 120))
        built = dataset(path, 120)
        backwards = [answer(built[i], built.config.tokenizer) for i in reversed(range(120))]
        assert backwards[::-1] == found
        assert built.num_broken == 20

    def test_data_that_is_broken_throughout_ends_the_run(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "s.tar", [(f"{n}.json", b"{") for n in range(3)])
        with pytest.raises(DataError, match=r"s\.tar: sample 0 and its 99 replacements"):
            dataset(path, 5)[0]

    def test_a_lost_shard_ends_the_run(self, tmp_path: Path) -> None:
        path = numbered(tmp_path / "s.tar", 0, 3)
        built = dataset(path)
        Path(path).unlink()
        with pytest.raises(DataError, match="gone"):
            built[0]


def test_a_tokenizer_without_conversations_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tokenizer-type MultimodalTokenizer"):
        config(tokenizer=object())
