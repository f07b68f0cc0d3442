"""Blends, splits and sizes: from what the command line names to three datasets."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets import blended_megatron_dataset_config
from megatron.core.datasets.blended_dataset import BlendedDataset, Oversampled, PhasedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    BlendedMegatronDatasetConfig,
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.index_cache import load_array, save_array
from megatron.core.datasets.utils import compile_helpers, get_blend_from_list, normalize
from tests.support.dataset_files import Tokenizer, config, dataset, numbered, write
from tests.support.ranks import run_ranks


def build(sizes: list[int | None], built_here: bool = True, **changes: Any) -> list[Any]:
    asked = config(**changes)
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: built_here, asked).build()


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Three sets of 20 documents; their tokens lie in [1, 200), [201, 400), [401, 512)."""
    return [
        write(tmp_path / name, numbered([length] * 20, first))
        for name, length, first in (("a", 9, 1), ("b", 9, 201), ("c", 5, 401))
    ]


def sources(data: Any) -> Counter[int]:
    """How many samples come from the set whose tokens begin at 1, 201 or 401."""
    return Counter(int(data[i]["tokens"][0]) // 200 for i in range(len(data)))


class TestNamingData:
    @pytest.mark.parametrize(
        ("words", "blend"),
        [
            (None, None),
            ([], None),
            (["p"], (["p"], None)),
            (["p", "q", "r"], (["p", "q", "r"], None)),
            (["p", "q"], (["p", "q"], None)),
            (["0.3", "p", "7", "q"], (["p", "q"], [0.3, 7.0])),
            (["1", "p"], (["p"], [1.0])),
        ],
    )
    def test_prefixes_with_and_without_weights(self, words: Any, blend: Any) -> None:
        assert get_blend_from_list(words) == blend

    def test_half_given_weights_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="'q' stands where a weight is expected"):
            get_blend_from_list(["0.3", "p", "q", "r"])

    def test_weights_are_normalized(self) -> None:
        assert normalize([1, 3]) == [0.25, 0.75]

    def test_there_is_nothing_to_compile(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            compile_helpers()
        assert "nothing to compile" in caplog.text


class TestSplits:
    @pytest.mark.parametrize(
        ("split", "fractions"),
        [
            ("1", [1, 0, 0]),
            ("969, 30, 1", [0.969, 0.03, 0.001]),
            ("8/1/1", [0.8, 0.1, 0.1]),
            ("0.5,0.5", [0.5, 0.5, 0]),
            ("1e1,0,0", [1, 0, 0]),
            ("'99,1,0'", [0.99, 0.01, 0]),
            ('"8, 1, 1"', [0.8, 0.1, 0.1]),
        ],
    )
    def test_weights_become_fractions(self, split: str, fractions: list[float]) -> None:
        assert parse_and_normalize_split(split) == pytest.approx(fractions)

    @pytest.mark.parametrize("split", ["", "0,0,0", "1,-1,1", "a,b,c", "1,2,3,4", "nan", "inf,1"])
    def test_other_words_are_refused(self, split: str) -> None:
        with pytest.raises(ConfigError, match="--split .*: give up to three weights"):
            parse_and_normalize_split(split)

    def test_random_words_are_weights_or_an_error(self) -> None:
        random = np.random.default_rng(0)
        for _ in range(300):
            split = "".join(random.choice(list("0123.,e- /"), random.integers(1, 12)))
            try:
                assert sum(parse_and_normalize_split(split)) == pytest.approx(1)
            except ConfigError:
                continue

    def test_ranges_follow_each_other_and_empty_ones_are_none(self) -> None:
        assert convert_split_vector_to_split_matrix([0.9, 0.1, 0.0]) == [(0, 0.9), (0.9, 1.0), None]
        overlap = convert_split_vector_to_split_matrix([0.5, 0.5, 0.0], [0.2, 0.8, 0.0])
        assert overlap == [(0, 0.2), (0.5, 1.0), None]

    def test_splits_divide_the_sequences_by_rounding(self, tmp_path: Path) -> None:
        prefix = write(tmp_path / "data", numbered([10] * 7))
        built = build([1, 1, 1], blend=([prefix], None), split="5,3,2")
        assert [list(d.indices) for d in built] == [[0, 1, 2, 3], [4, 5], [6]]


class TestConfig:
    def test_nothing_named_is_made_up(self) -> None:
        asked = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=8)
        assert asked.mock
        assert [part is not None for part in asked.split_matrix or []] == [True] * 3

    def test_the_config_of_gpt_is_found_here_too(self) -> None:
        assert blended_megatron_dataset_config.GPTDatasetConfig is GPTDatasetConfig

    def test_users_can_derive_plain_dataclasses(self) -> None:
        @dataclass
        class Mine(GPTDatasetConfig):
            flavour: str = "plain"

        mine = Mine(random_seed=1, sequence_length=8, tokenizer=Tokenizer(), flavour="sweet")
        assert (mine.flavour, mine.sequence_length) == ("sweet", 8)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"split": None}, "--data-path needs --split"),
            ({"blend": (["p", "q"], [1.0])}, "2 data paths has 1 weights"),
            ({"blend": (["p", "q"], [1.0, 0.0])}, "the weight of q is 0: give it a weight above 0"),
            ({"blend": (["p"], [float("nan")])}, "the weight of p is nan"),
            ({"blend_per_split": [(["p"], None)]}, r"three \(train, valid, test\), not 1"),
            (
                {"blend_per_split": [(["p"], None), None, None], "split": "1"},
                "--split 1 goes with one source",
            ),
            (
                {"blend_per_split": [(["p"], None), None, None], "blend": (["p"], None)},
                "--data-path goes with one source",
            ),
            ({"multiple_validation_sets": True}, "needs --full-validation"),
            (
                {
                    "multiple_validation_sets": True,
                    "full_validation": True,
                    "blend": (["p", "q"], [1.0, 2.0]),
                },
                "evaluates each set by itself",
            ),
        ],
    )
    def test_contradictions_are_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config(**changes)


class TestBlendedDataset:
    def parts(self, prefixes: list[str], num_samples: int | None = None) -> list[GPTDataset]:
        return [dataset(prefix, num_samples) for prefix in prefixes]

    def test_samples_come_in_proportion_and_each_set_in_order(self, prefixes: list[str]) -> None:
        parts = self.parts(prefixes, 20)
        blend = BlendedDataset(parts, [2, 1, 1], 20, config())
        assert len(blend) == 20
        assert sources(blend) == {0: 10, 1: 5, 2: 5}
        places = [0, 0, 0]
        for i in range(20):
            item = blend[i]
            which = item.pop("dataset_id")
            assert item["tokens"].tolist() == parts[which][places[which]]["tokens"].tolist()
            places[which] += 1

    def test_without_size_every_sample_comes_once(self, prefixes: list[str]) -> None:
        parts = self.parts(prefixes)
        blend = BlendedDataset(parts, [len(p) for p in parts], None, config())
        assert sources(blend) == {i: len(p) for i, p in enumerate(parts)}

    def test_a_set_that_cannot_give_enough_is_named(self, prefixes: list[str]) -> None:
        parts = self.parts(prefixes)
        message = (
            r"train blend takes 15 samples from .*c, which offers 12: .*-surplus \(now 0.005\)"
        )
        with pytest.raises(Oversampled, match=message):
            BlendedDataset(parts, [1, 1, 1], 45, config())

    def test_a_sample_that_fills_up_a_batch_bears_no_loss(self, prefixes: list[str]) -> None:
        blend = BlendedDataset(self.parts(prefixes, 20), [2, 1, 1], 20, config())
        assert blend[None]["loss_mask"].sum() == 0
        assert blend[None].keys() == blend[0].keys()

    def test_the_cache_is_used_and_mended(
        self, prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def blended() -> BlendedDataset:
            cached = config(path_to_cache=str(tmp_path / "cache"))
            return BlendedDataset(self.parts(prefixes, 20), [2, 1, 1], 20, cached)

        first = blended()
        stem = f"{first.unique_description_hash}-BlendedDataset-train"
        names = sorted(p.name for p in (tmp_path / "cache").iterdir())
        assert names == [
            f"{stem}-crc.json",
            f"{stem}-dataset_index.npy",
            f"{stem}-dataset_sample_index.npy",
            f"{stem}-description.txt",
        ]
        chosen = tmp_path / "cache" / names[1]
        built = first.dataset_index.tolist()
        with monkeypatch.context() as patched:
            patched.setattr(BlendedDataset, "_build", None)
            assert blended().dataset_index.tolist() == built  # read
        save_array(str(chosen), np.zeros(3, np.int16))
        assert blended().dataset_index.tolist() == built  # built again
        mended = load_array(str(chosen))
        assert mended is not None
        assert mended.tolist() == built

    def test_the_description_names_sets_weights_and_size(self, prefixes: list[str]) -> None:
        parts = self.parts(prefixes, 20)
        named = BlendedDataset(parts, [2, 1, 1], 20, config()).unique_identifiers
        assert list(named) == ["class", "datasets", "split", "weights", "size"]
        assert (named["split"], named["weights"], named["size"]) == ("train", [0.5, 0.25, 0.25], 20)
        assert named["datasets"] == [part.unique_identifiers for part in parts]
        counts = [len(part) for part in parts]
        whole = BlendedDataset(parts, counts, None, config()).unique_identifiers
        assert (whole["weights"], whole["size"]) == (counts, None)


class TestBuilder:
    def test_data_that_nobody_names_is_an_error(self) -> None:
        asked = config(blend=None, split="1,1,1")
        with pytest.raises(ConfigError, match="no data is named: give --data-path"):
            BlendedMegatronDatasetBuilder(GPTDataset, [8, 8, 8], lambda: True, asked).build()

    @pytest.mark.feature(
        "Data: weighted blends, exact to one sample a set, that never run off the end"
    )
    def test_shares_of_a_weighted_blend_are_exact_to_one_sample(self, prefixes: list[str]) -> None:
        random = np.random.default_rng(0)
        for _ in range(8):
            weights = [float(w) for w in random.random(3) + 0.01]
            size = int(random.integers(1, 200))
            train, _, _ = build([size, 0, 0], blend=(prefixes, weights))
            drawn = sources(train)
            total = sum(drawn.values())
            assert size <= total <= size + 3
            for i, share in enumerate(normalize(weights)):
                assert abs(drawn[i] - share * total) <= 1

    def test_each_set_offers_its_share_and_the_surplus(self, prefixes: list[str]) -> None:
        blend = (prefixes, [0.5, 0.3, 0.2])
        train, valid, test = build(
            [1000, 100, 0], blend=blend, split="8,2,0", mid_level_dataset_surplus=0.5
        )
        assert [d.num_samples for d in train.datasets] == [750, 450, 300]
        assert [d.num_samples for d in valid.datasets] == [75, 45, 30]
        assert (len(train), len(valid), test) == (1000, 100, None)

    def test_many_small_shares_never_run_off_the_end(self, tmp_path: Path) -> None:
        # 9 tokens are one sample of 8: every set offers exactly what it is asked for
        paths = [write(tmp_path / f"p{i}", numbered([9], 9 * i + 1)) for i in range(30)]
        weights = [1.0] + [1e-3] * 29
        train, _, _ = build([40, 0, 0], blend=(paths, weights), mid_level_dataset_surplus=0.0)
        assert len(train) == sum(ceil(40 * w) for w in normalize(weights))
        assert [train[i]["tokens"].shape for i in range(len(train))]

    def test_without_weights_every_set_is_read_once(
        self, prefixes: list[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        train, valid, _ = build([10, 10_000, 0], blend=(prefixes, None), split="5,5,0")
        assert len(train) == 10
        with caplog.at_level(logging.WARNING):
            assert len(valid) == sum(len(d) for d in valid.datasets) < 10_000
        assert sources(valid) == {i: len(d) for i, d in enumerate(valid.datasets)}

    def test_one_prefix_is_no_blend_unless_it_has_a_weight(self, prefixes: list[str]) -> None:
        assert isinstance(build([5, 0, 0], blend=(prefixes[:1], None))[0], GPTDataset)
        assert isinstance(build([5, 0, 0], blend=(prefixes[:1], [1.0]))[0], BlendedDataset)

    def test_every_split_can_have_a_blend_of_its_own(self, prefixes: list[str]) -> None:
        per_split = [(prefixes[:2], [1.0, 1.0]), (prefixes[2:], None), None]
        train, valid, test = build([10, 4, 4], blend_per_split=per_split)
        assert sources(train) == {0: 5, 1: 5}
        assert set(sources(valid)) == {2}
        assert test is None
        assert valid.unique_identifiers["split"] is None
        assert valid.unique_identifiers["split_matrix"] is None

    def test_full_validation_is_one_pass_whatever_size_is_named(self, prefixes: list[str]) -> None:
        per_split = [(prefixes[:2], [1.0, 1.0]), (prefixes, None), None]
        train, valid, _ = build([10, 3, 0], blend_per_split=per_split, full_validation=True)
        assert len(train) == 10
        assert sources(valid) == {i: len(d) for i, d in enumerate(valid.datasets)}
        assert [d.num_samples for d in valid.datasets] == [None] * 3

    def test_full_validation_of_a_weighted_blend_is_refused(self, prefixes: list[str]) -> None:
        with pytest.raises(ConfigError, match="cannot apply blend weights"):
            build([1, 1, 0], blend=(prefixes, [1, 1, 1]), split="5,5,0", full_validation=True)

    @pytest.mark.feature("Data: full validation passes, several validation sets side by side")
    def test_multiple_validation_sets_stay_apart(self, prefixes: list[str]) -> None:
        more = {"full_validation": True, "multiple_validation_sets": True}
        per_split = [(prefixes[:1], None), (prefixes, None), None]
        _, valid, _ = build([10, 3, 0], blend_per_split=per_split, **more)
        assert [set(sources(d)) for d in valid] == [{0}, {1}, {2}]
        per_split = [(prefixes[:1], None), (prefixes[:1], None), None]
        assert len(build([10, 3, 0], blend_per_split=per_split, **more)[1]) == 1

    def test_several_threads_build_the_same(self, prefixes: list[str], tmp_path: Path) -> None:
        def tokens(threads: int) -> list[list[int]]:
            cache = str(tmp_path / f"cache{threads}")
            more = {"num_dataset_builder_threads": threads, "path_to_cache": cache}
            train, _, _ = build([50, 0, 0], blend=(prefixes, [1, 2, 3]), **more)
            return [train[i]["tokens"].tolist() for i in range(50)]

        assert tokens(1) == tokens(3)

    def test_ranks_that_do_not_read_build_nothing(self) -> None:
        assert build([5, 5, 5], built_here=False, blend=(["/nowhere"], None)) == [None] * 3

    @pytest.mark.feature("Data: an empty split is an error at once, with counts and cure")
    @pytest.mark.parametrize("size", [10, None])
    def test_an_empty_split_is_told_at_once(self, tmp_path: Path, size: int | None) -> None:
        prefix = write(tmp_path / "data", numbered([30] * 10))
        message = (
            r"the test split of .*data is empty: its share of 10 sequences is 10 to 10 "
            r"\(--split 969, 30, 1\)"
        )
        with pytest.raises(DataError, match=message):
            build([10, 0, size], blend=([prefix], None), split="969, 30, 1")

    def test_more_sequences_than_an_index_can_name_are_refused(self, tmp_path: Path) -> None:
        class Huge(GPTDataset):
            @staticmethod
            def numel_low_level_dataset(low_level_dataset: Any) -> int:
                return 2**31

        prefix = write(tmp_path / "data", numbered([30]))
        builder = BlendedMegatronDatasetBuilder(
            Huge, [1, 0, 0], lambda: True, config(blend=([prefix], None))
        )
        with pytest.raises(DataError, match="2147483648 sequences, .* several data paths"):
            builder.build()

    def test_an_empty_split_that_nobody_reads_is_no_error(self, tmp_path: Path) -> None:
        prefix = write(tmp_path / "data", numbered([30] * 10))
        train, valid, test = build([10, 0, 0], blend=([prefix], None), split="969, 30, 1")
        assert len(train) >= 10
        assert (valid, test) == (None, None)


def _build_in_rank(rank: int, world_size: int, prefix: str, cache: str) -> tuple[int, list[int]]:
    train, _, _ = build([500, 0, 0], blend=([prefix], None), path_to_cache=cache)
    return len(train), train[7]["tokens"].tolist()


class TestRanks:
    @pytest.mark.feature(
        "Data: one process builds an index, the others wait for its files, no collective"
    )
    def test_ranks_that_share_a_cache_get_the_same_samples(self, tmp_path: Path) -> None:
        prefix = write(tmp_path / "data", numbered([30] * 17))
        results = run_ranks(_build_in_rank, 4, prefix, str(tmp_path / "cache"))
        assert all(result == results[0] for result in results)
        assert len(list((tmp_path / "cache").iterdir())) == 5

    def test_a_rank_whose_disk_is_its_own_builds_for_itself(self, tmp_path: Path) -> None:
        prefix = write(tmp_path / "data", numbered([30] * 17))
        caches = [str(tmp_path / f"node{node}") for node in range(2)]
        results = [run_ranks(_build_in_rank, 2, prefix, cache)[0] for cache in caches]
        assert results[0] == results[1]
        for first in Path(caches[0]).iterdir():
            assert first.read_bytes() == (Path(caches[1]) / first.name).read_bytes()


class TestPhases:
    def test_each_phase_begins_with_its_first_sample(self, prefixes: list[str]) -> None:
        parts = [
            build([size, 0, 0], blend=(prefixes[:2], weights))[0]
            for size, weights in ((30, [0.9, 0.1]), (50, [0.2, 0.8]))
        ]
        phased = PhasedDataset(parts, [0, 30])
        assert len(phased) == 30 + len(parts[1])
        for i in range(len(phased)):
            wanted = parts[0][i] if i < 30 else parts[1][i - 30]
            assert phased[i]["tokens"].tolist() == wanted["tokens"].tolist()
        assert not phased[None]["loss_mask"].any()

    def test_a_phase_that_is_over_is_not_needed(self, prefixes: list[str]) -> None:
        (last,) = build([50, 0, 0], blend=(prefixes[:2], [1.0, 1.0]))[:1]
        phased = PhasedDataset([None, last], [0, 30])
        assert phased[30]["tokens"].tolist() == last[0]["tokens"].tolist()
        with pytest.raises(AssertionError, match="of a phase that is over"):
            phased[29]

    @pytest.mark.parametrize("index_free", [False, True])
    def test_counts_of_a_phase_are_its_weights_to_one_sample(
        self, prefixes: list[str], index_free: bool
    ) -> None:
        weights = [0.61, 0.3, 0.09]
        blend = build(
            [333, 0, 0],
            blend=(prefixes, weights),
            index_free=index_free,
            has_exact_shares=True,
        )[0]
        counts = Counter(blend[i]["dataset_id"] for i in range(len(blend)))
        for source, weight in enumerate(weights):
            assert abs(counts[source] - weight * len(blend)) <= 1
