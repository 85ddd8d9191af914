"""Index keys, pages and queries for the indexer tests, and plain-Python models of pools and of selection.

Selection cases are made of small whole numbers: every product and sum is exact in every implementation and number
format, scores tie often, and results must be equal, not close. Outputs start poisoned.
"""

import dataclasses
import math
from collections.abc import Iterable

import pytest
import torch

POISON = 0x5A
FORMS = {"serving": torch.uint8, "bf16": torch.bfloat16, "fp32": torch.float32}
HEAD_DIM = 128
INDEX_PAGE_BYTES = 64 * 128 + 64 * 4

IMPLEMENTATIONS = ("reference", "op-cpu", pytest.param("op-cuda", marks=pytest.mark.gpu))
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_form = pytest.mark.parametrize("form", FORMS)


def device_of(implementation: str) -> str:
    return "cuda" if implementation == "op-cuda" else "cpu"


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    items = math.prod(shape) * dtype.itemsize
    return torch.full((items,), POISON, dtype=torch.uint8, device=device).view(dtype).view(shape)


def empty_pools(form: str, pages: int, page_size: int, device: str = "cpu", gap: int = 0) -> torch.Tensor:
    """Poisoned pages, `gap` bytes of other data behind each."""
    if form == "serving":
        width = page_size // 256 * INDEX_PAGE_BYTES
        return poisoned((pages, width + gap), torch.uint8, device)[:, :width]
    dtype = FORMS[form]
    flat = poisoned((pages, page_size // 4 * HEAD_DIM + gap // dtype.itemsize), dtype, device)
    return flat.as_strided((pages, page_size // 4, HEAD_DIM), (flat.stride(0), HEAD_DIM, 1))


def read_pool(pools: torch.Tensor, page: int, place: int) -> torch.Tensor:
    """float64 [128]: the key of the pool at `place` of a page."""
    if pools.dtype != torch.uint8:
        return pools[page, place].double()
    index_page = pools[page, place // 64 * INDEX_PAGE_BYTES :][:INDEX_PAGE_BYTES]
    codes = index_page[place % 64 * 128 :][:128].clone().view(torch.float8_e4m3fn)
    scale = index_page[64 * 128 + place % 64 * 4 :][:4].clone().view(torch.float32)
    return codes.double() * scale.double()


def write_pool(pools: torch.Tensor, page: int, place: int, key: torch.Tensor, scale: float = 1.0) -> None:
    """Put `key` at a place, in the serving form as codes of `key` and a scale by which it is multiplied."""
    if pools.dtype != torch.uint8:
        pools[page, place] = (key * scale).to(pools.dtype)
        return
    at = place // 64 * INDEX_PAGE_BYTES
    pools[page, at + place % 64 * 128 :][:128] = key.to(torch.float8_e4m3fn).view(torch.uint8)
    pools[page, at + 64 * 128 + place % 64 * 4 :][:4] = torch.tensor([scale], dtype=torch.float32).view(torch.uint8)


def owned_pools(count: int, rank: int, world: int, interleave: int) -> list[int]:
    """Of a request's first `count` pools those of a rank, in order: found by walking over tokens."""
    return [pool for pool in range(count) if pool * 4 // interleave % world == rank]


@dataclasses.dataclass(frozen=True)
class SelectCase:
    """One call of `c4_select` on one rank, and the numbers that it is made of.

    Attributes:
        keys: for each request, [pools, 128] whole numbers of all ranks' pools.
        scales: for each request, the power of two of each pool.
        values: [rows, heads, 128] whole numbers; `weights` [rows, heads] multiples of a quarter.
    """

    form: str
    keys: list[torch.Tensor]
    scales: list[list[float]]
    values: torch.Tensor
    weights: torch.Tensor
    block_table: torch.Tensor
    row_requests: list[int]
    positions: list[int]
    num_pools: int
    page_size: int
    interleave: int
    rank: int
    world: int
    lists: int

    def score(self, row: int, pool: int) -> float:
        request = self.row_requests[row]
        products = (self.values[row].double() @ self.keys[request][pool].double()).clamp(min=0)
        score = float(self.weights[row].double() @ products) * self.scales[request][pool]
        return -math.inf if math.isnan(score) else score

    def visible(self, row: int) -> list[int]:
        """This rank's pools that a row sees, in order of their number."""
        if self.row_requests[row] < 0:
            return []
        seen = [pool for pool in range(len(self.keys[self.row_requests[row]])) if 4 * pool + 3 <= self.positions[row]]
        return [pool for pool in owned_pools(len(seen), self.rank, self.world, self.interleave)]

    def expected(self, missing: Iterable[int] = ()) -> list[list[list[tuple[float, int]]]]:
        """[lists][rows]: (score, pool), the best first; without `missing` pools, those of pages that are not there."""
        result = []
        for number in range(self.lists):
            result.append([])
            for row in range(len(self.positions)):
                own = [pool for at, pool in enumerate(self.visible(row)) if at // 64 % self.lists == number]
                own = [pool for pool in own if pool not in missing]
                best = sorted(((self.score(row, pool), pool) for pool in own), key=lambda pair: (-pair[0], pair[1]))
                result[-1].append(best[: self.num_pools])
        return result

    def queries(self) -> torch.Tensor:
        if self.form == "serving":
            return self.values.to(torch.float8_e4m3fn).view(torch.uint8)
        return self.values.to(FORMS[self.form])

    def pools(self, gap: int = 0) -> torch.Tensor:
        pools = empty_pools(self.form, int(self.block_table.max()) + 2, self.page_size, gap=gap)
        for request, keys in enumerate(self.keys):
            for local, pool in enumerate(owned_pools(len(keys), self.rank, self.world, self.interleave)):
                block, place = divmod(local, self.page_size // 4)
                page = int(self.block_table[request, block])
                write_pool(pools, page, place, keys[pool], self.scales[request][pool])
        return pools

    def args(self, device: str = "cpu", gap: int = 0) -> tuple:
        rows = len(self.positions)
        requests, positions = (
            torch.tensor(values, dtype=torch.int32, device=device) for values in (self.row_requests, self.positions)
        )
        pools = self.pools(gap)
        whole = pools.as_strided((pools.untyped_storage().nbytes() // pools.element_size(),), (1,)).to(device)
        kept = max(4 << (self.num_pools - 1).bit_length(), 512)
        return (
            self.queries().to(device),
            self.weights.to(device),
            whole.as_strided(pools.shape, pools.stride()),
            self.block_table.to(device),
            requests,
            positions,
            poisoned((self.lists, rows, self.num_pools), torch.int64, device),
            poisoned((8 * self.lists * rows * kept,), torch.uint8, device),
            self.page_size,
            self.interleave,
            self.rank,
            self.world,
        )


def select_case(
    form: str = "serving",
    pools: tuple[int, ...] = (150, 3, 70),
    rows: tuple[tuple[int, int], ...] = ((0, 599), (0, 598), (1, 12), (-1, -1), (2, 200), (2, 2)),
    *,
    heads: int = 16,
    num_pools: int = 16,
    page_size: int = 256,
    interleave: int = 4,
    rank: int = 0,
    world: int = 1,
    lists: int = 1,
    seed: int = 0,
    largest: int = 2,
    rising: bool = False,
) -> SelectCase:
    """`rows` are (request, position). With `rising` each pool scores higher than the ones before it."""
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-largest, largest + 1, shape, generator=generator).float()

    keys = [whole(count, HEAD_DIM) for count in pools]
    scales = [[2.0 ** (int(e) - 2) for e in torch.randint(0, 4, (count,), generator=generator)] for count in pools]
    values, weights = whole(len(rows), heads, HEAD_DIM), whole(len(rows), heads) / 4
    if rising:
        # One key for all pools of a request, with ever larger scales: a score for each of 2 ** -60 .. 2 ** 60.
        keys = [key[:1].expand(len(key), -1) for key in keys]
        scales = [[2.0 ** (at % 120 - 60) * (1 + at // 120) for at in range(len(key))] for key in keys]
        weights = weights.abs() + 0.25
    blocks = -(-max(pools) * 4 // (page_size * world)) + 1
    table = 1 + torch.randperm(len(pools) * blocks, generator=generator).int().view(len(pools), blocks)
    requests, positions = [request for request, _ in rows], [position for _, position in rows]
    sizes = (num_pools, page_size, interleave, rank, world, lists)
    return SelectCase(form, keys, scales, values, weights, table, requests, positions, *sizes)


def orders_case(form: str, order: str, pools: int, num_pools: int, *, first: int = 0, lists: int = 1) -> SelectCase:
    """Rows of one request: one whose scores have an `order`, one with that turned round, one of equal scores, and one
    that sees every pool or not.

    Args:
        order: "rising" from pool to pool; "shuffled", next to each other among float32 numbers, three of each; "tied",
            but for the last three pools, which have the next number.
        first: so many pools are no numbers.
    """
    generator = torch.Generator().manual_seed(pools)
    case = select_case(form, (pools,), ((0, 4 * pools - 1),) * 4, num_pools=num_pools, lists=lists)
    scales = {
        "rising": torch.arange(pools) + 1.0,
        "shuffled": 2.0**23 + torch.randperm(pools, generator=generator) // 3,
        "tied": 1.0 + 2.0**-23 * (torch.arange(pools) >= pools - 3),
    }[order]
    case.scales[0][:] = [math.nan] * first + scales.tolist()[first:]
    # The last row's are worth little at first, so that of what is kept columns have unequally many afterwards.
    case.keys[0][:, 0], case.keys[0][:500, 1] = 1, 0
    case.values.zero_()
    case.values[:3, :, 0], case.values[3, :, 1] = 1, 1
    case.weights.copy_(torch.tensor([[1.0], [-1.0], [0.0], [0.5]]).expand(4, 16) / 16)
    return case


def decoded(candidates: torch.Tensor) -> list[list[list[tuple[float, int]]]]:
    """[lists][rows]: (score, pool) of the entries before the first absent one, behind which nothing may follow."""
    result = []
    for lists in candidates.tolist():
        result.append([])
        for row in lists:
            present = [value for value in row if value != -(2**63)]
            assert row == present + [-(2**63)] * (len(row) - len(present))
            result[-1].append([_decode(value) for value in present])
    return result


def _decode(value: int) -> tuple[float, int]:
    bits, pool = value >> 32, 2**31 - 1 - (value & 0xFFFFFFFF)
    bits = bits if bits >= 0 else bits ^ 0x7FFFFFFF
    return float(torch.tensor([bits], dtype=torch.int32).view(torch.float32)), pool


def encode(score: float, pool: int) -> int:
    bits = int(torch.tensor([score]).view(torch.int32))
    return ((bits if bits >= 0 else bits ^ 0x7FFFFFFF) << 32) | (2**31 - 1 - pool)


def expand(lists: list[list[tuple[float, int]]], position: int, num_pools: int) -> tuple[list[int], int]:
    """A row's list of tokens and its length, from (score, pool) of all lists."""
    best = sorted((pair for some in lists for pair in some), key=lambda pair: (-pair[0], pair[1]))[:num_pools]
    tokens = [4 * pool + slot for _, pool in best for slot in range(4)]
    tokens += range((position + 1) // 4 * 4, position + 1)
    return tokens + [-1] * (4 * num_pools + 3 - len(tokens)), len(tokens)


@dataclasses.dataclass
class WriteCase:
    """Requests whose tokens are written call by call."""

    form: str
    keys: list[torch.Tensor]
    gates: list[torch.Tensor]
    bias: torch.Tensor
    block_table: torch.Tensor
    ring: torch.Tensor
    pools: torch.Tensor
    page_size: int
    interleave: int
    rank: int
    world: int

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    def args(self, parts: list[tuple[int, int]], ring_rows: list[int] | None = None, drafts: int = 0) -> tuple:
        """A call with tokens `begin .. end` of each request."""
        device = self.ring.device
        given = list(zip(self.keys, self.gates, parts, strict=True))
        keys = torch.cat([key[begin:end] for key, _, (begin, end) in given])
        gates = torch.cat([gate[begin:end] for _, gate, (begin, end) in given])
        edges = [0]
        for begin, end in parts:
            edges.append(edges[-1] + end - begin)
        rows = ring_rows if ring_rows is not None else list(range(len(parts)))
        vectors = (edges, [begin for begin, _ in parts], rows)
        vectors = (torch.tensor(vector, dtype=torch.int32, device=device) for vector in vectors)
        tensors = (keys.to(device), gates.to(device), self.bias.to(device), *vectors, self.block_table.to(device))
        geometry = (self.page_size, self.interleave, self.rank, self.world, drafts)
        return *tensors, self.ring, self.pools, *geometry

    def pooled(self, request: int, pool: int) -> torch.Tensor:
        """float64 [128], channel by channel as the definition says."""
        keys = self.keys[request][4 * pool : 4 * pool + 4].double()
        gates = self.gates[request][4 * pool : 4 * pool + 4].double() + self.bias.double()
        powers = (gates - gates.amax(0)).exp()
        return (powers * keys).sum(0) / powers.sum(0)

    def stored(self, request: int, pool: int) -> torch.Tensor | None:
        """float64 [128]: what the pages hold for a pool; None if this rank does not own it."""
        own = owned_pools(pool + 1, self.rank, self.world, self.interleave)
        if pool not in own:
            return None
        block, place = divmod(own.index(pool), self.page_size // 4)
        return read_pool(self.pools.cpu(), int(self.block_table[request, block]), place)

    def assert_pools(self, lengths: list[int]) -> None:
        """Every whole pool of the given lengths, within the rounding of the form."""
        for request, length in enumerate(lengths):
            for pool in range(length // 4):
                found, expected = self.stored(request, pool), self.pooled(request, pool)
                if found is not None:
                    assert_close_key(found, expected, self.form, f"request {request}, pool {pool}")


def assert_close_key(found: torch.Tensor, expected: torch.Tensor, form: str, where: str) -> None:
    if form == "serving":
        rotation = torch.ones(1, 1, dtype=torch.float64)
        while len(rotation) < HEAD_DIM:
            rotation = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), rotation)
        expected = rotation @ expected / math.sqrt(HEAD_DIM)
        # Half a unit in the last place of 3 bits, of the value or of the largest one's 2 ** -9; and two bfloat16.
        limit = expected.abs() * 2.0**-4 + expected.abs().amax() * (2.0**-10 / 448 * 512 + 2.0**-7)
    elif form == "bf16":
        limit = expected.abs() * 2.0**-8 + 1e-6
    else:
        limit = expected.abs() * 1e-6 + 1e-6
    wrong = (found - expected).abs() > limit
    assert not wrong.any(), f"{where}: {found[wrong][:3].tolist()} for {expected[wrong][:3].tolist()}"


def write_case(
    form: str = "fp32",
    lengths: tuple[int, ...] = (37, 6, 90),
    *,
    page_size: int = 256,
    interleave: int = 4,
    rank: int = 0,
    world: int = 1,
    slots: int = 4,
    device: str = "cpu",
    gap: int = 0,
    seed: int = 0,
) -> WriteCase:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if form in ("serving", "bf16") else torch.float32
    keys, gates = (
        [torch.randn(length, HEAD_DIM, generator=generator).to(dtype) for length in lengths] for _ in range(2)
    )
    bias = torch.randn(4, HEAD_DIM, generator=generator)
    blocks = -(-max(lengths) // (page_size * world))
    table = 1 + torch.randperm(len(lengths) * blocks, generator=generator).int().view(len(lengths), blocks)
    ring = poisoned((len(lengths) + 1, slots, 2, HEAD_DIM), dtype, device)
    pools = empty_pools(form, len(lengths) * blocks + 2, page_size, device, gap)
    return WriteCase(form, keys, gates, bias, table, ring, pools, page_size, interleave, rank, world)
