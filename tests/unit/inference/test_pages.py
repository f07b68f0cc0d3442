"""Pages are counted, shared and found again, and none is lost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron.core.inference.paged_engine.pages import PagePool


def _digest(number: int) -> bytes:
    return PagePool(1, 1).digest(b"", np.array([number], dtype=np.int64), 0)


class NaivePool:
    """Users of pages as lists, and the order of releases as one list."""

    def __init__(self, num_pages: int) -> None:
        self.users = [0] * num_pages
        self.digests: dict[int, bytes] = {}
        self.released: list[int] = []  # pages with a digest, oldest first

    def check(self, pool: PagePool) -> None:
        assert pool.num_free == self.users.count(0)
        for page, digest in self.digests.items():
            assert pool.find([digest]) == [page]


def test_ten_thousand_random_operations_agree_with_a_naive_pool() -> None:
    rng = random.Random(5)
    pool = PagePool(24, 4)
    naive = NaivePool(24)
    held: list[list[int]] = []
    for number in range(10_000):
        action = rng.randrange(6)
        if action < 2:
            count = rng.randrange(6)
            pages = pool.allocate(count)
            assert (pages is None) == (count > naive.users.count(0))
            for page in pages or ():
                assert naive.users[page] == 0
                if page in naive.digests:  # only the oldest, and only if no other page is free
                    assert all(naive.users[p] or p in naive.digests for p in range(24))
                    assert page == naive.released[0]
                    del naive.digests[page], naive.released[0]
                naive.users[page] = 1
            if pages:
                held.append(pages)
        elif action < 4 and held:
            pages = held.pop(rng.randrange(len(held)))
            pool.release(pages)
            for page in reversed(pages):
                naive.users[page] -= 1
                if page in naive.digests and not naive.users[page]:
                    naive.released.append(page)
        elif action == 4 and held:
            page = rng.choice(rng.choice(held))
            if page not in naive.digests:
                naive.digests[page] = _digest(number)
                pool.keep(page, _digest(number))
        elif action == 5 and naive.digests:
            page, digest = rng.choice(sorted(naive.digests.items()))
            assert pool.num_unused([page]) == (naive.users[page] == 0)
            pool.share(pool.find([digest, _digest(-1), digest]))
            if page in naive.released:
                naive.released.remove(page)
            naive.users[page] += 1
            held.append([page])
        if number % 2_500 == 2_499:
            pool.invalidate(number)
            naive.digests.clear()
            naive.released.clear()
        naive.check(pool)
    for pages in held:
        pool.release(pages)
    assert pool.num_free == 24


def test_the_end_of_a_released_sequence_is_reused_before_its_start() -> None:
    pool = PagePool(3, 4)
    pages = pool.allocate(3) or []
    for page in pages:
        pool.keep(page, _digest(page))
    pool.release(pages)
    assert pool.allocate(1) == [pages[2]]
    assert pool.find([_digest(p) for p in pages]) == pages[:2]


def test_a_second_page_with_the_same_content_is_not_kept() -> None:
    pool = PagePool(2, 4)
    first, second = pool.allocate(2) or []
    pool.keep(first, _digest(1))
    pool.keep(second, _digest(1))
    pool.release([second])
    assert pool.find([_digest(1)]) == [first]
    pool.release([first])
    assert pool.allocate(2) == [second, first]


def test_roots_differ_by_weight_version_and_source() -> None:
    pool = PagePool(1, 4)
    roots = {pool.root([]), pool.root([1]), pool.root([1, 2])}
    pool.invalidate(1)
    roots |= {pool.root([]), pool.root([1])}
    assert len(roots) == 5


def test_a_page_released_twice_is_a_mistake() -> None:
    pool = PagePool(1, 4)
    pages = pool.allocate(1) or []
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)
