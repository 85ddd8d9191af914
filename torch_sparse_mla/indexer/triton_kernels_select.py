"""CUDA implementation of `c4_select` in Triton.

`_select_pools_kernel`, a program for each few rows and each list: scores one tile of pools after another and stores,
for each row, the candidates above the row's threshold. What is kept is a row's `kept_candidates` numbers in the
workspace, a column for each pool of a tile, so that threads append without asking each other. When a column could
overflow, a number is looked for by bisection that has enough candidates above it and not many more; it is the new
threshold, and what lies above it is spread over the columns again. `_order_pools_kernel`, a program for each row and
list, brings what is left down to the best and sorts these. Where candidates lie in the workspace depends on the order
of tiles, the result does not: candidates are distinct numbers.
"""

import torch
import triton
import triton.language as tl

from ..records.triton_codec import decode_e4m3
from ..triton_launch import AotConfiguration, AotConfigurations, PreparedOp, capability_of, on_device
from . import pools as layout
from .contract import FULL_ROWS, MANY_ROWS, MAX_ROWS_TOGETHER, check_c4_select, kept_candidates

MAX_HEADS_TOGETHER = 256

POOL = tl.constexpr(layout.POOL_TOKENS)
DIM = tl.constexpr(layout.HEAD_DIM)
INDEX_PAGE_POOLS = tl.constexpr(layout.POOLS_PER_INDEX_PAGE)
INDEX_PAGE_BYTES = tl.constexpr(layout.INDEX_PAGE_BYTES)
TILE = tl.constexpr(layout.TILE_POOLS)
ABSENT = tl.constexpr(layout.ABSENT)
MAX_POOL = tl.constexpr(layout.MAX_POOL)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Below every score, as the upper half of `ABSENT`.
NOTHING = tl.constexpr(-(2**31))
LOWER_HALF = tl.constexpr(0xFFFFFFFF)
# Of float32 keys, at once.
CHANNELS = tl.constexpr(16)


_checked = PreparedOp(check_c4_select, outputs=("candidates", "workspace"))


def c4_select(
    q: torch.Tensor,
    weights: torch.Tensor,
    pools: torch.Tensor,
    block_table: torch.Tensor,
    row_requests: torch.Tensor,
    positions: torch.Tensor,
    candidates: torch.Tensor,
    workspace: torch.Tensor,
    page_size: int,
    interleave: int,
    rank: int,
    world: int,
) -> None:
    call = _checked(
        q,
        weights,
        pools,
        block_table,
        row_requests,
        positions,
        candidates,
        workspace,
        page_size,
        interleave,
        rank,
        world,
    )
    rows, heads, _ = q.shape
    if not rows:
        return
    lists, _, num_pools = candidates.shape
    requests, blocks = block_table.shape
    form = select_form(q.dtype, rows, lists, heads, num_pools, capability_of(q.device))
    with on_device(q):
        call.launch(
            _select_pools_kernel,
            (triton.cdiv(rows, form["ROWS"]), lists),
            q,
            weights,
            pools,
            block_table,
            row_requests,
            positions,
            workspace,
            rows,
            num_pools,
            requests,
            blocks,
            len(pools),
            block_table.stride(0),
            pools.stride(0) * pools.element_size() // 16,
            rank,
            WORLD=world,
            INTERLEAVE=interleave,
            PAGE_SIZE=page_size,
            **form,
        )
        order = order_form(rows, num_pools)
        call.launch(_order_pools_kernel, (lists * rows,), workspace, candidates, num_pools, **order)


def select_form(
    dtype: torch.dtype, rows: int, lists: int, heads: int, num_pools: int, capability: int
) -> dict[str, int]:
    """Constants and options of `_select_pools_kernel`: of static sizes alone."""
    native = capability >= 89
    is_decoded = dtype == torch.uint8 and not native
    # Keys pass through registers where they are decoded or multiplied in parts.
    in_registers = is_decoded or dtype == torch.float32
    together = 1
    if rows >= MANY_ROWS and not in_registers:
        # Keys of two bytes take the room of twice as many; and on sm_100 four rows of 64 heads would spill.
        half = dtype != torch.uint8 or (heads == 64 and capability == 100)
        most = MAX_HEADS_TOGETHER // 2 if half else MAX_HEADS_TOGETHER
        together = min(most // heads, MAX_ROWS_TOGETHER if rows * lists >= FULL_ROWS else MAX_ROWS_TOGETHER // 2)
    warps = 8 if together == MAX_ROWS_TOGETHER or is_decoded else 4
    # Told a limit, ptxas does not spill below it. With these, two or three programs run on a multiprocessor at once:
    # elsewhere they would not do, nor for the products of 64 heads.
    registers = {MAX_ROWS_TOGETHER: 128, MAX_ROWS_TOGETHER // 2: 168} if capability == 90 and heads < 64 else {}
    # Half of the stages go to a tile's entry of the block table, the others to its keys. A program of one row has
    # little to do for a tile.
    stages = 2 if in_registers else 3 if together == 1 else 5
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers.get(together, 255)}
    return {"HEADS": heads, "ROWS": together, "KEPT": kept_candidates(num_pools), "NATIVE": native, **options}


def order_form(rows: int, num_pools: int) -> dict[str, int]:
    """Constants and options of `_order_pools_kernel`. Where there are few rows, more threads sort one sooner."""
    return {"KEPT": kept_candidates(num_pools), "num_warps": 8 if rows < MANY_ROWS else 4, "num_stages": 1}


# Sizes are not specialised on their values, so nothing is compiled when a batch of another size first comes.
SELECT_SIZES = [
    "rows",
    "num_pools",
    "num_requests",
    "num_blocks",
    "num_pages",
    "block_table_stride",
    "page_stride_16",
    "rank",
]
# The workspace is aligned, but of two candidates loaded at once one would be stored by another thread.
UNALIGNED = ["block_table_ptr", "row_requests_ptr", "positions_ptr", "workspace_ptr"]


@triton.jit(do_not_specialize=SELECT_SIZES, do_not_specialize_on_alignment=UNALIGNED)
def _select_pools_kernel(
    q_ptr,
    weights_ptr,
    pools_ptr,
    block_table_ptr,
    row_requests_ptr,
    positions_ptr,
    workspace_ptr,
    rows: tl.int32,
    num_pools: tl.int32,
    num_requests: tl.int32,
    num_blocks: tl.int32,
    num_pages: tl.int32,
    block_table_stride: tl.int64,
    page_stride_16: tl.int64,
    rank: tl.int32,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    key, row = _places(ROWS)
    own_rows = tl.minimum(rows - tl.program_id(0) * ROWS, ROWS)
    head = _head_of_column(HEADS, ROWS)
    has_head = head < rows.to(tl.int64) * HEADS
    queries = _load_codes(q_ptr + head[:, None] * DIM + tl.arange(0, DIM)[None, :], has_head[:, None], NATIVE)
    weights = tl.load(weights_ptr + head, mask=has_head, other=0.0)
    list_row = tl.program_id(1).to(tl.int64) * rows + tl.program_id(0) * ROWS
    kept_ptr = workspace_ptr.to(tl.pointer_type(tl.int64)) + list_row * KEPT
    _clear(kept_ptr, own_rows, KEPT)
    # A row has a column for each key of a tile. Columns lie beside each other; where the next candidate goes.
    column = row * KEPT + key
    place = column
    threshold = tl.full(row.shape, NOTHING, tl.int32)
    step = tl.num_programs(1) * TILE
    row_requests_ptr += tl.program_id(0) * ROWS
    positions_ptr += tl.program_id(0) * ROWS
    request = tl.load(row_requests_ptr + row, mask=row < own_rows, other=-1)
    # A padded row sees nothing.
    request = tl.where((request >= 0) & (request < num_requests), request, -1)
    last = tl.max(request)
    for current in range(tl.min(tl.where(request < 0, last + 1, request)), last + 1):
        position = _position(row_requests_ptr, positions_ptr, row, own_rows, current)
        mine = _visible(position, num_blocks, rank, WORLD, INTERLEAVE, PAGE_SIZE)
        # Row by row: a maximum over all threads would cost a register in all of the loop.
        most = 0
        for number in range(own_rows):
            at = _position(row_requests_ptr, positions_ptr, number, own_rows, current)
            most = tl.maximum(most, _visible(at, num_blocks, rank, WORLD, INTERLEAVE, PAGE_SIZE))
        table_ptr = block_table_ptr + block_table_stride * current
        begin = tl.program_id(1) * TILE
        while begin < most:
            # A tile adds one candidate to a column at most.
            room = (KEPT - tl.max(place - column)) // TILE
            if room < KEPT // TILE // 4:
                for number in range(own_rows):
                    pivot, total = _keep_best(kept_ptr + number * KEPT, num_pools, _window(num_pools), KEPT)
                    threshold = tl.where(row == number, tl.maximum(threshold, (pivot >> 32).to(tl.int32)), threshold)
                    filled = (total + (TILE - 1) - key) // TILE * TILE
                    place = tl.where(row == number, column + filled, place)
                # Of which there is more now: found out in the next turn.
                room = 0
            for first in range(begin, tl.minimum(most, begin + room * step), step):
                page_ptr, present = _index_page(pools_ptr, table_ptr, first, most, num_pages, page_stride_16, PAGE_SIZE)
                if pools_ptr.dtype.element_ty == tl.float32:
                    products = _exact_products(q_ptr, rows, page_ptr, present, HEADS, ROWS)
                else:
                    products = tl.dot(_load_keys(page_ptr, present, NATIVE), tl.trans(queries))
                scores = _head_sum(products, weights, HEADS, ROWS)
                if pools_ptr.dtype.element_ty == tl.uint8:
                    scale_ptr = (page_ptr + INDEX_PAGE_POOLS * DIM).to(tl.pointer_type(tl.float32))
                    scores *= tl.load(scale_ptr + key, mask=present & (key >= 0), other=0.0)
                pool = first + key
                ordered = _ordered(scores)
                keep = present & (pool < mine) & (ordered > threshold)
                candidate = _candidates(ordered, _global_pool(pool, rank, WORLD, INTERLEAVE))
                tl.store(kept_ptr + place, candidate, mask=keep)
                place += tl.where(keep, TILE, 0)
            begin += room * step


@triton.jit(do_not_specialize=["num_pools"], do_not_specialize_on_alignment=["workspace_ptr"])
def _order_pools_kernel(workspace_ptr, candidates_ptr, num_pools: tl.int32, KEPT: tl.constexpr):
    padded: tl.constexpr = KEPT // 4
    list_row = tl.program_id(0).to(tl.int64)
    kept_ptr = workspace_ptr.to(tl.pointer_type(tl.int64)) + list_row * KEPT
    _keep_best(kept_ptr, num_pools, padded, KEPT)
    column = tl.arange(0, padded)
    best = tl.sort(tl.load(kept_ptr + column, cache_modifier=".cg"), descending=True)
    tl.store(candidates_ptr + list_row * num_pools + column, best, mask=column < num_pools)


@triton.jit
def _places(ROWS: tl.constexpr):
    """[TILE * ROWS] twice: which key of a tile and which row a score that `_head_sum` returns belongs to.

    In this order the thread that has the products of a key and a row is the one that stores their candidate, if there
    are as many warps as `select_form` says: tensor cores leave a thread keys that are 8 apart, in every warp 16 others.
    """
    together: tl.constexpr = ROWS if ROWS < 4 else 4
    half: tl.constexpr = TILE // 2
    place = tl.arange(0, TILE * ROWS)
    key = place // together % half // 8 * 16 + place // (half * ROWS) * 8 + place // together % 8
    return key, place // (half * together) % (ROWS // together) * together + place % together


@triton.jit
def _head_of_column(HEADS: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS * HEADS]: which query a column of products belongs to.

    Of eight columns tensor cores leave a thread two neighbours, so that each of four rows has threads of its own: they
    add up all heads of the row by themselves.
    """
    together: tl.constexpr = ROWS if ROWS < 4 else 4
    pair: tl.constexpr = 8 // together
    column = tl.arange(0, ROWS * HEADS)
    head = column % (together * HEADS) // 8 * pair + column % pair
    row = column // (together * HEADS) * together + column % 8 // pair
    return tl.program_id(0).to(tl.int64) * (ROWS * HEADS) + row * HEADS + head


@triton.jit
def _head_sum(products, weights, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """From products [tile, rows * heads], columns in the order of `_head_of_column`, scores in that of `_places`.

    A row's heads are added up in the same order in every form, so a score does not depend on how many rows there are:
    every eighth pair of heads one after another, as the threads of a program of one row do, then these four sums.
    """
    # As `relu` does; a score that is no number then counts as the lowest.
    products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    products = _four_parts(products, HEADS, ROWS)
    weights = _four_parts(tl.broadcast_to(weights[None, :], [TILE, ROWS * HEADS]), HEADS, ROWS)
    parts = _add_products(tl.zeros([TILE * ROWS, 2, 2], tl.float32), products, weights)
    return tl.sum(tl.sum(parts, 1), 1)


@triton.jit
def _four_parts(values, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """From [tile, rows * heads] to [tile * rows, 2, 2, heads / 4]: each a fourth of a row's heads."""
    together: tl.constexpr = ROWS if ROWS < 4 else 4
    groups: tl.constexpr = ROWS // together
    pair: tl.constexpr = 8 // together
    values = tl.reshape(values, [TILE // 16, 2, 8, groups, HEADS // pair, together, pair])
    values = tl.reshape(tl.permute(values, 1, 3, 0, 2, 5, 4, 6), [TILE * ROWS, HEADS // 8, 2, 2, 2])
    return tl.reshape(tl.permute(values, 0, 2, 3, 1, 4), [TILE * ROWS, 2, 2, HEADS // 4])


@triton.jit
def _add_products(total, values, weights):
    """`total` and the products of values and weights along their last axis, one after another. By `fma`: which product
    of a sum is rounded for itself would be the compiler's choice otherwise, and another in another form."""
    count: tl.constexpr = values.shape[3]
    if count == 1:
        return tl.fma(tl.reshape(values, total.shape), tl.reshape(weights, total.shape), total)
    else:
        halves: tl.constexpr = [values.shape[0], 2, 2, count // 2, 2]
        values, others = tl.split(tl.reshape(values, halves))
        weights, other_weights = tl.split(tl.reshape(weights, halves))
        return _add_products(_add_products(total, values, weights), others, other_weights)


@triton.jit
def _index_page(pools_ptr, table_ptr, pool, most, num_pages, page_stride_16, PAGE_SIZE: tl.constexpr):
    """The address of the keys from `pool` on, the first of an index page, and whether they have a page."""
    per_page: tl.constexpr = PAGE_SIZE // POOL
    # A scalar also where the interpreter counts loops with Python's numbers.
    pool = tl.full((), 0, tl.int32) + pool
    page = tl.load(table_ptr + pool // per_page, mask=pool < most, other=-1)
    # The factor of 16 tells the compiler that pages are aligned, so that it emits wide loads.
    begin = page.to(tl.int64) * page_stride_16 * (128 // pools_ptr.dtype.element_ty.primitive_bitwidth)
    if pools_ptr.dtype.element_ty == tl.uint8:
        begin += pool % per_page // INDEX_PAGE_POOLS * INDEX_PAGE_BYTES
    else:
        begin += pool % per_page * DIM
    return pools_ptr + begin, (page >= 0) & (page < num_pages)


@triton.jit
def _load_keys(page_ptr, present, NATIVE: tl.constexpr):
    """[TILE, 128] as the dot product takes them."""
    key = tl.arange(0, TILE)[:, None]
    return _load_codes(page_ptr + key * DIM + tl.arange(0, DIM)[None, :], present & (key >= 0), NATIVE)


@triton.jit
def _exact_products(q_ptr, rows, keys_ptr, present, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """float32 keys times float32 queries, a few channels at a time: whole ones do not fit into registers. Three
    products of tf32 parts lose nothing that a float32 sum would keep."""
    head = _head_of_column(HEADS, ROWS)
    live = head < rows.to(tl.int64) * HEADS
    key = tl.arange(0, TILE)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    products = tl.zeros([TILE, ROWS * HEADS], tl.float32)
    for first in range(0, DIM, CHANNELS):
        queries = tl.load(q_ptr + head[:, None] * DIM + first + channel, mask=live[:, None], other=0.0)
        keys = tl.load(keys_ptr + key * DIM + first + channel, mask=present & (key >= 0), other=0.0)
        products = tl.dot(keys, tl.trans(queries), products, input_precision="tf32x3")
    return products


@triton.jit
def _load_codes(pointers, mask, NATIVE: tl.constexpr):
    """e4m3 codes as what tensor cores multiply; other numbers as they are."""
    if pointers.dtype.element_ty == tl.uint8:
        if NATIVE:
            # As numbers from the start: codes would pass through registers to become some.
            return tl.load(pointers.to(tl.pointer_type(tl.float8e4nv)), mask=mask, other=0.0)
        else:
            return decode_e4m3(tl.load(pointers, mask=mask, other=0), tl.float16, False)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _ordered(scores):
    """int32 numbers in the order of scores: the upper half of a candidate, see `pools`."""
    scores = tl.where(scores == scores, scores, float("-inf")) + 0.0
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ MAGNITUDE, bits)


@triton.jit
def _candidates(ordered, pool):
    # All bits of a pool number turned over are MAX_POOL less it.
    return (ordered.to(tl.int64) << 32) | (pool ^ MAX_POOL).to(tl.int64)


@triton.jit
def _clear(kept_ptr, own_rows, KEPT: tl.constexpr):
    for number in range(own_rows):
        tl.store(kept_ptr + number * KEPT + tl.arange(0, KEPT), tl.full([KEPT], ABSENT, tl.int64))
    # Other threads store candidates there.
    tl.debug_barrier()


@triton.jit
def _window(num_pools):
    """How many candidates at most are kept when what is kept has overflowed: whole tiles, about a quarter more than
    must be. To find a number with just so many above it would take longer."""
    return (num_pools + num_pools // 4 + (TILE - 1)) // TILE * TILE


@triton.jit
def _keep_best(kept_ptr, num_pools, limit, KEPT: tl.constexpr):
    """Of a row's candidates drop those that are not among the best `num_pools`, until no more than `limit` are left.
    They are put in front, in any order, and `ABSENT` behind them.

    Returns: the number at or below which all were dropped (`ABSENT` where none had to be), and how many are left: never
        more than `limit`, whatever the workspace holds, or a program that another call writes under would not end.
    """
    column = tl.arange(0, KEPT)
    # Threads read what others stored, and below store where others read and where others will store.
    tl.debug_barrier()
    values = tl.load(kept_ptr + column, cache_modifier=".cg")
    tl.debug_barrier()
    pivot = _pivot(values, num_pools, limit)
    keep = values > pivot
    place = tl.cumsum(keep.to(tl.int32), 0)
    # Candidates of one call are distinct, so that `pivot` leaves no more.
    keep &= place <= limit
    place = tl.minimum(place, limit)
    total = tl.sum(keep.to(tl.int32), 0)
    place = tl.where(keep, place - 1, total + column - place)
    tl.store(kept_ptr + place, tl.where(keep, values, ABSENT))
    tl.debug_barrier()
    return pivot, total


@triton.jit
def _pivot(values, num_pools, limit):
    """A number above which lie at least `num_pools` and at most `limit` of distinct candidates; `ABSENT` if there are
    no more than `limit` in all."""
    pivot = tl.full((), ABSENT, tl.int64)
    scores = (values >> 32).to(tl.int32)
    above = tl.sum((scores > NOTHING).to(tl.int32), 0)
    if above > limit:
        low = tl.min(tl.where(scores > NOTHING, scores, MAGNITUDE), 0) - 1
        low, high, above = _bisect(scores, low, tl.max(scores, 0), above, num_pools, limit)
        # Where too many have one score, the pools decide.
        low = (low.to(tl.int64) << 32) | LOWER_HALF
        high = (high.to(tl.int64) << 32) | LOWER_HALF
        pivot, high, above = _bisect(values, low, high, above, num_pools, limit)
    return pivot


@triton.jit
def _bisect(values, low, high, above, num_pools, limit):
    """Narrow `low`, above which lie `above >= num_pools` values, and `high`, above which lie fewer, until no more than
    `limit` lie above `low`, or no number lies between them."""
    while (above > limit) & (low + 1 < high):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        more = tl.sum((values > middle).to(tl.int32), 0)
        high = tl.where(more < num_pools, middle, high)
        low = tl.where(more < num_pools, low, middle)
        above = tl.where(more < num_pools, above, more)
    return low, high, above


@triton.jit
def _position(requests_ptr, positions_ptr, row, rows, request):
    """Of rows of a request; -1 for others."""
    own = tl.load(requests_ptr + row, mask=row < rows, other=-1)
    return tl.load(positions_ptr + row, mask=own == request, other=-1)


@triton.jit
def _visible(position, num_blocks, rank, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """How many of a rank's pools a row sees. A block table too short hides what lies behind it."""
    pools = tl.where(position < 0, 0, _local_pools(position, rank, WORLD, INTERLEAVE))
    return tl.minimum(pools.to(tl.int64), num_blocks.to(tl.int64) * (PAGE_SIZE // POOL)).to(tl.int32)


@triton.jit
def _local_pools(position, rank, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr):
    """How many of a rank's pools end at a position or before."""
    # Before the sum, which could overflow: a position of 2**31 - 1 ends a pool.
    whole = position // POOL + (position % POOL == POOL - 1).to(tl.int32)
    if WORLD == 1:
        return whole
    else:
        run: tl.constexpr = INTERLEAVE // POOL
        rest = tl.minimum(tl.maximum(whole % (run * WORLD) - rank * run, 0), run)
        return whole // (run * WORLD) * run + rest


@triton.jit
def _global_pool(local, rank, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr):
    if WORLD == 1:
        return local
    else:
        run: tl.constexpr = INTERLEAVE // POOL
        return (local // run * WORLD + rank) * run + local % run


def aot_configurations(capability: int) -> AotConfigurations:
    """All forms of pools; few rows, more and many; the fewest and the most candidates kept."""
    wide = ("block_table_stride", "page_stride_16")
    dtypes = {
        "serving": ("*u8:16", torch.uint8),
        "bf16": ("*bf16:16", torch.bfloat16),
        "fp32": ("*fp32:16", torch.float32),
    }
    few, more, many = (1, 32, 512, 4), (MANY_ROWS, 32, 512, 4), (FULL_ROWS, 32, 512, 4)
    forms: list[dict[str, int]] = []
    for name, (pools, dtype) in dtypes.items():
        for rows, heads, num_pools, world in (few, more, many, (MANY_ROWS, 64, 100, 1), (1, 16, 16, 3)):
            form = {"dtype": dtype} | select_form(dtype, rows, 1, heads, num_pools, capability)
            if form in forms:
                continue
            forms.append(form)
            signature = dict.fromkeys(UNALIGNED, "*i32") | {"workspace_ptr": "*u8"}
            signature |= {size: "i64" if size in wide else "i32" for size in SELECT_SIZES}
            signature |= {"q_ptr": pools, "weights_ptr": "*fp32:16", "pools_ptr": pools}
            options = {option: form[option] for option in ("num_warps", "num_stages", "maxnreg")}
            constants = {constant: form[constant] for constant in ("HEADS", "ROWS", "KEPT", "NATIVE")}
            constants |= {"WORLD": world, "INTERLEAVE": 4 * world, "PAGE_SIZE": 768}
            title = f"select-{name}-{rows}x{heads}x{num_pools}"
            yield AotConfiguration(title, _select_pools_kernel, signature, constants, options)
    for rows, num_pools in ((1, 512), (MANY_ROWS, 512), (MANY_ROWS, 16)):
        options = order_form(rows, num_pools)
        constants = {"KEPT": options.pop("KEPT")}
        signature = {"workspace_ptr": "*u8", "candidates_ptr": "*i64:16", "num_pools": "i32"}
        yield AotConfiguration(f"order-{rows}x{num_pools}", _order_pools_kernel, signature, constants, options)
