"""Requests of a sharded prefill, and the pages that they hold or share."""

import collections
import copy
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache

from ..errors import reject

OP = "PrefillClient"


@dataclass(eq=False)
class Request:
    """A sequence that is served.

    Attributes:
        pool: of its client.
        row: its row in every ring, its own while it is served.
        states: what linear attention keeps of it.
        pages: page numbers, the same on every rank; block b holds local tokens from `b * page_size` on each.
        length: tokens that are written.
        served: whether it still holds its row and pages.
        furthest: the most tokens that it had at a roll-back: its ring ends there.
        marks: those of tokens that it still has.
    """

    pool: "PagePool"
    row: int
    states: Cache
    pages: list[int] = field(default_factory=list)
    length: int = 0
    served: bool = True
    furthest: int = 0
    marks: "weakref.WeakSet[Mark]" = field(default_factory=weakref.WeakSet)


@dataclass(frozen=True, eq=False)
class Mark:
    """A point that a request can go back to. Records, pooled keys and rings need no copy: they are written again."""

    request: Request
    length: int
    states: Cache

    @staticmethod
    def of(request: Request) -> "Mark":
        mark = Mark(request, request.length, copy.deepcopy(request.states))
        request.marks.add(mark)
        return mark


@dataclass(eq=False)
class Prefix:
    """The beginning of a request, in whole pages, kept for others: its pages and the states at its end."""

    pool: "PagePool"
    length: int
    states: Cache
    pages: list[int]
    served: bool = True


class PagePool:
    """Page numbers, dealt in a random but fixed order; a page is free again when nobody holds it any more."""

    def __init__(self, count: int) -> None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        self.count, self._free = count, collections.deque(order)
        self._holders: collections.Counter[int] = collections.Counter()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            reject(OP, "batch", f"{count} pages more", f"the {len(self._free)} that are free; release requests first")
        taken = [self._free.popleft() for _ in range(count)]
        self.hold(taken)
        return taken

    def is_shared(self, page: int) -> bool:
        return self._holders[page] > 1

    def hold(self, pages: Iterable[int]) -> None:
        self._holders.update(pages)

    def drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._free.append(page)
