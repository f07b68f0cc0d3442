"""Pages of the key and value cache: which are free, shared, or kept for later requests.

A page holds ``page_size`` tokens.  Requests share a page only if it is full, and nobody writes to
a shared page.  A full page may have a digest of all tokens up to its end: it then stays findable
after its last user has released it, until the pool needs it for something else.
Every operation takes constant time for each page.  Pages are integers; the tensors are elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from megatron.core.inference.paged_engine.request import Routes
from megatron.core.inference.paged_engine.step_plan import Integers


class PagePool:
    """Reference counts of all pages, and the digests of those that have known content.

    Lanes share one pool.  Digests belong to ``weight_version``, the version of the weights.
    ``num_ahead``: the content of a page depends on so many tokens after its last one.
    ``longest_short``: longest sequence with the short frequencies of LongRoPE, None without it.
    ``routes`` [pages, page_size, layers, k]: the experts of the tokens in pages, for a model whose
    choices are recorded: they are shared, copied and forgotten as the keys are.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_ahead: int = 0,
        longest_short: int | None = None,
        of_routes: tuple[int, int] | None = None,
    ) -> None:
        """``of_routes``: layers and k of the ``routes``."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_ahead = num_ahead
        self.longest_short = longest_short
        self.weight_version = 0
        self.routes: Routes | None = None
        if of_routes is not None:
            self.routes = np.zeros((num_pages, page_size, *of_routes), np.int16)
        self._num_users = [0] * num_pages
        self._empty = list(range(num_pages - 1, -1, -1))  # free, without a digest
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, with one; oldest release first
        self._digest_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Number of pages that no request uses, those with a digest included."""
        return len(self._empty) + len(self._kept)

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Return ``count`` pages for one user, or None if fewer are free."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            if self._empty:
                page = self._empty.pop()
            else:
                page, _ = self._kept.popitem(last=False)
                del self._page_of[self._digest_of.pop(page)]
            self._num_users[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a user to pages in use or found by `find`."""
        for page in pages:
            if not self._num_users[page]:
                del self._kept[page]
            self._num_users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a user from pages, in the order of a sequence: its last page is reused first."""
        for page in reversed(pages):
            self._num_users[page] -= 1
            if self._num_users[page]:
                assert self._num_users[page] > 0, f"page {page} was released twice"
            elif page in self._digest_of:
                self._kept[page] = None
            else:
                self._empty.append(page)

    def places(self, pages: Integers, first: int, end: int) -> tuple[Integers, Integers]:
        """Return the pages, and the places in them, of positions ``first`` to ``end - 1``."""
        numbers, places = np.divmod(np.arange(first, end), self.page_size)
        return pages[numbers], places

    def keep(self, page: int, digest: bytes) -> None:
        """Make a full page in use findable by ``digest``, unless another page already is."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Return the pages of the first ``digests``, up to the first that no page has."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_full(self, num_tokens: int) -> int:
        """Return how many pages have their content if the first ``num_tokens`` are known."""
        return max(num_tokens - self.num_ahead, 0) // self.page_size

    def digest(self, previous: bytes, tokens: Integers, page: int) -> bytes:
        """Return the digest of a page of ``tokens``; ``previous``: digest of the page before it."""
        start = page * self.page_size
        text = tokens[start : start + self.page_size + self.num_ahead]
        return blake2b(previous + text.tobytes(), digest_size=16).digest()

    def num_unused(self, pages: Iterable[int]) -> int:
        """Return how many of ``pages`` are free: `share` would take them from `num_free`."""
        return sum(not self._num_users[page] for page in pages)

    def invalidate(self, weight_version: int) -> None:
        """Forget the content of all pages: the weights are now of ``weight_version``."""
        self.weight_version = weight_version
        self._empty += self._kept
        self._kept.clear()
        self._digest_of.clear()
        self._page_of.clear()

    def is_long(self, num_tokens: int) -> bool:
        """Return whether a sequence has the long frequencies of LongRoPE."""
        return self.longest_short is not None and num_tokens > self.longest_short

    def root(self, source: Sequence[int], *, is_long: bool = False, adapter: int = 0) -> bytes:
        """Return the digest to put before the first page.

        ``source``: tokens of the encoder.  ``is_long``: see `is_long`; no token is below 0.
        ``adapter``: its number; 0 is none.
        """
        salt = [-1] * is_long + [-1 - adapter] * (adapter > 0)
        text = np.array([self.weight_version, *salt, *source], dtype=np.int64)
        return blake2b(text.tobytes(), digest_size=16).digest()
