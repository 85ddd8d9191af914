"""Which graph serves a batch: pads to a captured size, and says why where none does. Plain Python; no PyTorch."""

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .modes import CUDAGraphMode, GraphSupport

DEFAULT_CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64)
_MAX_ROWS = 1 << 20


class Batch(NamedTuple):
    """What a step is asked to do.

    Attributes:
        rows: query rows.
        uniform: whether every request brings equally many of them (a decode batch).
    """

    rows: int
    uniform: bool = True


class Choice(NamedTuple):
    """How a batch runs.

    Attributes:
        mode: "full", "piecewise" or "none".
        rows: rows to run: the padded number, or with "none" the batch's own.
        reason: why it is not what the mode asks for; None where it is.
    """

    mode: str
    rows: int
    reason: str | None = None


class Dispatcher:
    """FULL, then PIECEWISE, then NONE.

    Args:
        mode: what the user asked for.
        sizes: numbers of rows to capture, in any order.
        rows_per_request: rows of each request of a uniform decode batch (more than 1: speculative decoding).
        support: the least that the operators of the step allow, and which operator that is.
    """

    def __init__(
        self,
        mode: CUDAGraphMode,
        sizes: Sequence[int] = DEFAULT_CAPTURE_SIZES,
        rows_per_request: int = 1,
        support: tuple[GraphSupport, str | None] = (GraphSupport.ALWAYS, None),
    ) -> None:
        self.mode = mode
        self.sizes = check_sizes(sizes)
        self.rows_per_request = rows_per_request
        self.support = support
        self.captured: dict[str, set[int]] = {"full": set(), "piecewise": set()}

    def to_capture(self) -> Iterable[tuple[str, int]]:
        """(mode, rows) of every graph to make: largest first, so that smaller ones fit into the pool's memory."""
        for rows in reversed(self.sizes):
            if self.mode.has_full and self._full_fits(Batch(rows, True)) is None:
                yield "full", rows
            if self.mode.has_pieces:
                yield "piecewise", rows

    def choose(self, batch: Batch) -> Choice:
        """How a batch runs. A pure function of the batch and of what has been captured."""
        wanted = self.mode.runtime(batch.uniform)
        if wanted == "none":
            return Choice("none", batch.rows)
        position = bisect.bisect_left(self.sizes, batch.rows)
        if position == len(self.sizes):
            return Choice("none", batch.rows, f"more rows than the largest capture size {self.sizes[-1]}")
        padded, reason = self.sizes[position], None
        if wanted == "full":
            reason = self._full_fits(batch) or self._missing("full", padded)
            if reason is None:
                return Choice("full", padded)
        if self.mode.has_pieces:
            missing = self._missing("piecewise", padded)
            if missing is None:
                return Choice("piecewise", padded, reason)
            reason = reason or missing
        return Choice("none", batch.rows, reason)

    def _missing(self, mode: str, rows: int) -> str | None:
        return None if rows in self.captured[mode] else f"no {mode} graph of {rows} rows was captured"

    def _full_fits(self, batch: Batch) -> str | None:
        """Why a batch may not run as one graph; None where it may."""
        level, op = self.support
        if level == GraphSupport.ALWAYS:
            return None
        if level == GraphSupport.NEVER:
            return f"{op} may not be captured"
        if not batch.uniform:
            return f"{op} may be captured for uniform batches only"
        if level == GraphSupport.UNIFORM_SINGLE_TOKEN and self.rows_per_request != 1:
            return f"{op} may be captured for one row a request only, and there are {self.rows_per_request}"
        return None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_ROWS


def check_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Sorted, without repetitions. Raises ValueError for what is no size."""
    given = list(sizes) if isinstance(sizes, Iterable) else sizes
    if not isinstance(given, list) or not given or not all(map(_is_size, given)):
        raise ValueError(
            f"torch_sparse_mla.compile: capture_sizes: got {given}; allowed: at least one integer, each from 1 to "
            f"{_MAX_ROWS}"
        )
    return tuple(sorted(set(given)))
