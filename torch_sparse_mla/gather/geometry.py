"""The page size that everything is sized by: proposed while it may still change, frozen before memory is profiled."""

import torch

from ..errors import reject

_OP = "PageGeometry"


class PageGeometry:
    """One page size, known at first provisionally, then for good.

    An engine learns its final page size late: other cache groups may enlarge it. A workspace sized by the provisional
    one is too small, and fails far away, at the first long prompt; so nothing can be sized before `freeze`.

    Args:
        page_size: the provisional page size, in records; None: not known yet.
    """

    def __init__(self, page_size: int | None = None) -> None:
        self._page_size, self._frozen = None, False
        if page_size is not None:
            self.propose(page_size)

    def __repr__(self) -> str:
        state = "frozen" if self._frozen else "provisional"
        return f"PageGeometry({self._page_size}, {state})"

    @property
    def frozen(self) -> bool:
        return self._frozen

    @property
    def page_size(self) -> int:
        """The frozen page size. Raises RuntimeError before it is frozen."""
        if not self._frozen:
            raise RuntimeError(
                f"torch_sparse_mla::{_OP}: the page size {self._page_size} is provisional; call freeze(page_size) with "
                "the size that the caches are bound with, before anything is sized by it"
            )
        return self._page_size

    def propose(self, page_size: int) -> None:
        """Set the provisional page size. Raises ValueError once another one is frozen."""
        self._check(page_size)
        self._page_size = page_size

    def freeze(self, page_size: int | None = None) -> None:
        """Make the page size final: the given one, or the one proposed last. The same one again changes nothing.

        Raises: ValueError for another page size than the frozen one, or where there is none at all.
        """
        page_size = self._page_size if page_size is None else page_size
        self._check(page_size)
        self._page_size, self._frozen = page_size, True

    def check_cache(self, cache: torch.Tensor) -> None:
        """Raise ValueError for a cache `[pages, page_size, record_bytes]` of another page size."""
        if cache.dim() != 3 or cache.shape[1] != self.page_size:
            reject(_OP, "cache", f"shape {list(cache.shape)}", f"shape [pages, {self.page_size}, record_bytes]")

    def _check(self, page_size: object) -> None:
        if not isinstance(page_size, int) or page_size < 1:
            reject(_OP, "page_size", repr(page_size), "an integer, 1 or more")
        if self._frozen and page_size != self._page_size:
            allowed = f"{self._page_size}, which is frozen; make a new PageGeometry, and everything sized by it, anew"
            reject(_OP, "page_size", page_size, allowed)
