"""Selection over sharded pools with the query rows split by rank: sizes, and what travels. Pure integer functions.

Where each rank scores its own pools for all rows, candidates of 8 bytes travel: those of every row from every rank.
Here the pooled keys travel, 33 bytes a token in the serving form, and each rank scores all of them for its share of
the rows; then the pool numbers of each row, 4 bytes a pool, travel to all ranks. What is selected is the same.

    index pages    own pages -> [world, padded, page_bytes], once a layer     `keys`
    select         own rows against the pools of each rank in turn; the exact merge
    pool numbers   own rows -> [world, share, num_pools] int32                `numbers`

A pool of the serving form is no run of bytes, an index page is: 64 pools, codes and then scales. So index pages are the
records that travel, of each request as many from every rank as from the first one, which has the most; at most one of
them for each request and rank is not full.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..contract import ALIGNMENT_BYTES
from ..errors import reject
from ..gather.plan import CHANNEL_SLABS, GatherPlan, round_up
from ..sharding import local_length
from .contract import EXACT_DTYPES, MAX_POOLS, c4_select_workspace_bytes
from .pools import HEAD_DIM, INDEX_PAGE_BYTES, POOL_TOKENS, POOLS_PER_INDEX_PAGE, TOKENS_PER_INDEX_PAGE

_OP = "RowSplit"
_CANDIDATE_BYTES = 8
_NUMBER_BYTES = 4


@dataclass(frozen=True)
class RowSplit:
    """The reserved sizes of a split selection.

    Attributes:
        requests, rows, max_tokens: most requests, query rows, and tokens of all requests together, of a chunk.
        num_pools: pools that a row selects.
        world, interleave: the DCP geometry; the interleave is a multiple of 4 and divides 256, an index page.
        page_size: tokens in a page of a rank, a multiple of 256.
        dtype: of the pools: uint8 for the serving form, float32 or bfloat16 for the exact form.
        lists: those that the pools of each rank are dealt out to, as for `c4_select`: more let few rows fill a GPU.
    """

    requests: int
    rows: int
    max_tokens: int
    num_pools: int
    world: int
    interleave: int
    page_size: int
    dtype: torch.dtype = torch.uint8
    lists: int = 1

    def __post_init__(self) -> None:
        for name in ("requests", "rows", "max_tokens", "num_pools", "world", "interleave", "page_size", "lists"):
            value = getattr(self, name)
            most = MAX_POOLS if name == "num_pools" else 2**31 - 1
            if not isinstance(value, int) or not 1 <= value <= most:
                reject(_OP, name, repr(value), f"an integer from 1 to {most}")
        if self.page_size % TOKENS_PER_INDEX_PAGE:
            reject(_OP, "page_size", self.page_size, f"a multiple of {TOKENS_PER_INDEX_PAGE} tokens, an index page")
        split = self.world > 1 and self.interleave % POOL_TOKENS
        if split or TOKENS_PER_INDEX_PAGE % self.interleave:
            allowed = f"a multiple of {POOL_TOKENS} that divides {TOKENS_PER_INDEX_PAGE}; any divisor with one rank"
            reject(_OP, "interleave", self.interleave, allowed)
        if self.dtype not in (torch.uint8, *EXACT_DTYPES):
            reject(_OP, "dtype", self.dtype, "uint8, float32 or bfloat16: that of the pools")

    @property
    def page_bytes(self) -> int:
        """Bytes of an index page."""
        if self.dtype == torch.uint8:
            return INDEX_PAGE_BYTES
        return POOLS_PER_INDEX_PAGE * HEAD_DIM * self.dtype.itemsize

    @property
    def keys(self) -> GatherPlan:
        """Sizes of the gather of index pages: its tokens are index pages, dealt to the ranks one by one."""
        unit = self.page_size // TOKENS_PER_INDEX_PAGE
        tokens = -(-self.max_tokens // self.world) + self.requests * self.interleave
        capacity = round_up(-(-tokens // TOKENS_PER_INDEX_PAGE) + self.requests, unit)
        return GatherPlan(self.requests, 1, capacity, self.world, 1, unit)

    @property
    def numbers(self) -> GatherPlan:
        """Sizes of the gather of pool numbers: its tokens are rows, a rank's share in a cache of one-record pages."""
        return GatherPlan(1, 1, -(-self.rows // self.world), self.world, 1, 1)

    def pages(self, length: int) -> int:
        """Index pages of a request of so many tokens that each rank sends."""
        return -(-local_length(0, length, self.world, self.interleave) // TOKENS_PER_INDEX_PAGE)

    def share(self, rows: int) -> int:
        """Most rows of a rank. They are dealt out one by one, since a later row sees more pools than an earlier one."""
        return -(-rows // self.world)

    def sent_lengths(self, lengths: Sequence[int]) -> list[int]:
        """What `keys` takes for the lengths of requests."""
        return [self.world * self.pages(length) for length in lengths]

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether the index pages of requests of these lengths fit."""
        return self.keys.host_padded(self.sent_lengths(lengths)) <= self.keys.capacity

    def gathered_bytes(self, lengths: Sequence[int], rows: int) -> int:
        """Bytes of all ranks' index pages and pool numbers; a rank receives all but its own, `world - 1` parts."""
        pages = self.keys.host_padded(self.sent_lengths(lengths))
        return self.world * (pages * self.page_bytes + self.share(rows) * self.num_pools * _NUMBER_BYTES)

    def candidate_bytes(self, rows: int) -> int:
        """The same for the other form: candidates of all ranks for all rows."""
        return self.world * rows * self.num_pools * _CANDIDATE_BYTES

    def reserved_bytes(self, device_type: str = "cuda") -> int:
        """Bytes on a rank of a `SplitSelector`: its buffers, and the slabs of channels that write peer memory."""
        keys, numbers, width = self.keys, self.numbers, self.num_pools * _NUMBER_BYTES
        share = numbers.capacity
        gathered = (keys.gathered_records * self.page_bytes, numbers.gathered_records * width)
        scratch = self.world * self.lists * share * self.num_pools * _CANDIDATE_BYTES
        scratch += c4_select_workspace_bytes(share, self.num_pools, self.lists) + share * width
        # Plans, and the block table of rows.
        words = keys.words + numbers.words + share
        slabs = 0
        if device_type == "cuda" and self.world > 1:
            slabs = sum(CHANNEL_SLABS * round_up(size, ALIGNMENT_BYTES) for size in gathered)
        return sum(gathered) + scratch + 4 * words + slabs
