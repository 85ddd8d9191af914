"""Every benchmark shape, once, with the bytes it must move and the operations it must do."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from torch_sparse_mla.records import LATENT_DIM, LAYOUTS

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
HEADS = (8, 16, 32, 64, 128)
TOPKS = (512, 2048, 2051)
MAIN_LAYOUT = "fp8_ds_mla"
MAIN_TOPK = 2048
MAIN_HEADS = 16
# Enough to see a trend in each of the secondary dimensions.
FEW_ROWS = (1, 8, 32, 128)
PREFILL_ROWS = (512, 2048, 8192)
MTP_ROWS_PER_REQUEST = 4
MTP_REQUESTS = (1, 8, 16)
# A request's MTP rows choose from this many times top-k slots. Four rows then have a union of 1.48 x top-k, the
# "about 3,000" that the exchange is designed for.
MTP_POOL = 1.5
RECORD_TOKENS = (1, 64, 4096, 65536)
PLAN_ROWS = (4, 16, 32)
PLAN_WORLDS = (1, 4, 8)
EXCHANGE_ROWS = (1, 4, 8, 16, 32)
# The widest first: a run that is short of time leaves out what comes last.
EXCHANGE_RECORD_BYTES = (656, 432, 368)
EXCHANGE_LAYERS = (1, 3)
EXCHANGE_WORLDS = (2, 4, 8)
BESIDE_ROWS = (4, 32)
PACK_RECORDS = (2048, 8192, 32_768, 65_536)
SHARED_LAYERS = 3
STEP_LAYOUTS = (MAIN_LAYOUT, "nvfp4_ds_mla")
STEP_QUICK_ROWS = (1, 8, 32)
# Slot index of one token in a list (int32), and slot of one token in a write (int64).
INDEX_BYTES = 4
SLOT_BYTES = 8
BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True)
class DecodeShape:
    """One `sparse_ckv_decode` call: `rows` query tokens, `rows_per_request` of them from each request (MTP)."""

    rows: int
    heads: int
    topk: int
    layout: str
    rows_per_request: int = 1

    @property
    def query_dim(self) -> int:
        return LAYOUTS[self.layout].query_dim

    @property
    def record_bytes(self) -> int:
        return LAYOUTS[self.layout].record_bytes

    @property
    def request_pool(self) -> int:
        """Slots that the rows of one request choose from; 0: every row chooses from the whole cache."""
        return round(MTP_POOL * self.topk) if self.rows_per_request > 1 else 0

    @property
    def distinct_records(self) -> int:
        """Records that the call must read once, counting a record that MTP rows share once (the expected union)."""
        if self.rows_per_request == 1:
            return self.rows * self.topk
        missed = (1 - self.topk / self.request_pool) ** self.rows_per_request
        return round(self.rows // self.rows_per_request * self.request_pool * (1 - missed))

    @property
    def bytes(self) -> int:
        """Fewest bytes through memory: every distinct record, index, query and result once."""
        per_head = (self.query_dim + LATENT_DIM) * BF16_BYTES + FP32_BYTES
        lists = self.rows * self.topk * INDEX_BYTES
        return self.distinct_records * self.record_bytes + lists + self.rows * self.heads * per_head

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.heads * self.topk * (self.query_dim + LATENT_DIM)

    def fields(self) -> dict:
        return {
            "rows": self.rows,
            "heads": self.heads,
            "topk": self.topk,
            "layout": self.layout,
            "rows_per_request": self.rows_per_request,
        }


@dataclass(frozen=True)
class RecordShape:
    """One `write_ckv_records` or `read_ckv_records` call on bf16 tokens."""

    op: str
    tokens: int
    layout: str

    @property
    def bytes(self) -> int:
        layout = LAYOUTS[self.layout]
        return self.tokens * (layout.record_bytes + layout.query_dim * BF16_BYTES + SLOT_BYTES)

    @property
    def flops(self) -> int:
        """Conversion only: not counted."""
        return 0

    def fields(self) -> dict:
        return {"op": self.op, "tokens": self.tokens, "layout": self.layout}


@dataclass(frozen=True)
class PlanShape:
    """One `plan_selection` call: the lists of `rows` query tokens, `rows_per_request` of them from each request."""

    rows: int
    topk: int
    world: int
    rows_per_request: int = MTP_ROWS_PER_REQUEST

    @property
    def requests(self) -> int:
        return self.rows // self.rows_per_request

    @property
    def request_pool(self) -> int:
        """Positions that the rows of one request choose from."""
        return round(MTP_POOL * self.topk) if self.rows_per_request > 1 else self.topk

    @property
    def union(self) -> int:
        """Distinct positions of all requests (expected)."""
        missed = (1 - self.topk / self.request_pool) ** self.rows_per_request
        return round(self.requests * self.request_pool * (1 - missed))

    @property
    def bytes(self) -> int:
        """Fewest bytes through memory: every list read once, `remap` and `owned_slots` written once."""
        return 3 * self.rows * self.topk * INDEX_BYTES

    @property
    def flops(self) -> int:
        """Integers only: not counted."""
        return 0

    def fields(self) -> dict:
        return {"rows": self.rows, "topk": self.topk, "world": self.world, "rows_per_request": self.rows_per_request}


def decode_grid(device_type: str, quick: bool) -> list[DecodeShape]:
    """The default shapes of a device, those of one layout together."""
    if device_type == "cpu":
        layouts = (MAIN_LAYOUT,) if quick else (MAIN_LAYOUT, "nvfp4_ds_mla_fp8rope", "bf16_mla")
        rows = (1, 8)
        return [DecodeShape(r, MAIN_HEADS, MAIN_TOPK, layout) for layout, r in product(layouts, rows)]
    if quick:
        main = [DecodeShape(r, h, MAIN_TOPK, MAIN_LAYOUT) for h, r in product((16, 64), FEW_ROWS)]
        return main + [DecodeShape(r, MAIN_HEADS, MAIN_TOPK, "nvfp4_ds_mla_fp8rope") for r in (1, 32)]
    main = [DecodeShape(r, h, MAIN_TOPK, MAIN_LAYOUT) for h, r in product(HEADS, ROWS)]
    topks = [DecodeShape(r, MAIN_HEADS, k, MAIN_LAYOUT) for k, r in product(TOPKS, FEW_ROWS) if k != MAIN_TOPK]
    mtp = [
        DecodeShape(n * MTP_ROWS_PER_REQUEST, h, MAIN_TOPK, MAIN_LAYOUT, MTP_ROWS_PER_REQUEST)
        for h, n in product((16, 64), MTP_REQUESTS)
    ]
    others = [layout for layout in LAYOUTS if layout != MAIN_LAYOUT]
    layouts = [
        DecodeShape(r, h, MAIN_TOPK, layout)
        for layout in others
        for h, r in (*product((MAIN_HEADS,), FEW_ROWS), *product((64,), (8, 64)))
    ]
    prefill = [DecodeShape(r, MAIN_HEADS, MAIN_TOPK, MAIN_LAYOUT) for r in PREFILL_ROWS]
    return main + topks + mtp + prefill + layouts


def record_grid(device_type: str, quick: bool) -> list[RecordShape]:
    tokens = RECORD_TOKENS
    if quick or device_type == "cpu":
        tokens = RECORD_TOKENS[:3]
    layouts = (MAIN_LAYOUT, "nvfp4_ds_mla_fp8rope") if quick else tuple(LAYOUTS)
    return [
        RecordShape(op, t, layout)
        for layout, op, t in product(layouts, ("write_ckv_records", "read_ckv_records"), tokens)
    ]


def plan_grid(device_type: str, quick: bool) -> list[PlanShape]:
    rows = PLAN_ROWS[:1] if quick else PLAN_ROWS
    worlds = (4,) if quick or device_type == "cpu" else PLAN_WORLDS
    return [PlanShape(r, MAIN_TOPK, world) for world, r in product(worlds, rows)]


@dataclass(frozen=True)
class ExchangeShape:
    """One exchange of `layers` layers among `world` ranks: what `rows` query tokens selected, up to four of a request.

    `beside`: the computation that runs at the same time, if any.
    """

    rows: int
    topk: int
    record_bytes: int
    world: int
    layers: int
    beside: str = ""

    @property
    def plan(self) -> PlanShape:
        return PlanShape(self.rows, self.topk, self.world, min(self.rows, MTP_ROWS_PER_REQUEST))

    @property
    def bytes(self) -> int:
        """What a rank receives from its peers (the expected union)."""
        return self.memory_bytes * (self.world - 1) // (2 * self.world * self.world)

    @property
    def memory_bytes(self) -> int:
        """Fewest bytes through memory for all ranks together: every workspace read from somewhere and written once."""
        return 2 * self.world * self.layers * self.plan.union * self.record_bytes

    @property
    def flops(self) -> int:
        return 0

    def fields(self) -> dict:
        return {
            "rows": self.rows,
            "topk": self.topk,
            "record_bytes": self.record_bytes,
            "world": self.world,
            "layers": self.layers,
            "rows_per_request": self.plan.rows_per_request,
            **({"beside": self.beside} if self.beside else {}),
        }


@dataclass(frozen=True)
class PackShape:
    """Records of one rank, gathered from its cache into its workspace."""

    records: int
    record_bytes: int

    @property
    def bytes(self) -> int:
        return self.records * (2 * self.record_bytes + INDEX_BYTES)

    @property
    def flops(self) -> int:
        return 0

    def fields(self) -> dict:
        return {"op": "pack", "records": self.records, "record_bytes": self.record_bytes}


@dataclass(frozen=True)
class StepShape:
    """A decode step of a rank through one Full layer and the Shared layers that follow, under DCP."""

    rows: int
    heads: int
    topk: int
    layout: str
    world: int
    shared_layers: int = SHARED_LAYERS

    @property
    def plan(self) -> PlanShape:
        return PlanShape(self.rows, self.topk, self.world, min(self.rows, MTP_ROWS_PER_REQUEST))

    @property
    def record_bytes(self) -> int:
        return LAYOUTS[self.layout].record_bytes

    @property
    def bytes(self) -> int:
        """A layer's selected records, read once, wherever they are (the expected union)."""
        return self.plan.union * self.record_bytes

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.heads * self.topk * (LAYOUTS[self.layout].query_dim + LATENT_DIM)

    def fields(self) -> dict:
        return {
            "rows": self.rows,
            "heads": self.heads,
            "topk": self.topk,
            "layout": self.layout,
            "world": self.world,
            "shared_layers": self.shared_layers,
            "rows_per_request": self.plan.rows_per_request,
        }


def exchange_grid(worlds: Sequence[int], quick: bool) -> list[ExchangeShape]:
    rows, widths = (EXCHANGE_ROWS[:3], (656,)) if quick else (EXCHANGE_ROWS, EXCHANGE_RECORD_BYTES)
    return [
        ExchangeShape(r, MAIN_TOPK, width, world, layers)
        for world, width, r, layers in product(worlds, widths, rows, EXCHANGE_LAYERS)
    ]


def beside_grid(worlds: Sequence[int], quick: bool) -> list[ExchangeShape]:
    """Three layers that travel while something else is computed."""
    rows = BESIDE_ROWS[:1] if quick else BESIDE_ROWS
    return [
        ExchangeShape(r, MAIN_TOPK, LAYOUTS[MAIN_LAYOUT].record_bytes, world, 3, beside)
        for world, beside, r in product(worlds, ("gemm", "attention"), rows)
    ]


def pack_grid(quick: bool) -> list[PackShape]:
    records, widths = (PACK_RECORDS[:2], (656,)) if quick else (PACK_RECORDS, EXCHANGE_RECORD_BYTES)
    return [PackShape(count, width) for width, count in product(widths, records)]


def step_grid(worlds: Sequence[int], quick: bool) -> list[StepShape]:
    rows, layouts = (STEP_QUICK_ROWS, STEP_LAYOUTS[:1]) if quick else (EXCHANGE_ROWS, STEP_LAYOUTS)
    return [StepShape(r, MAIN_HEADS, MAIN_TOPK, layout, world) for world, layout, r in product(worlds, layouts, rows)]


@dataclass(frozen=True)
class GatherShape:
    """One operator of a prefill gather for a chunk of `rows` query rows at the end of one prompt of `context` tokens.

    `c4_prefill_gather` with world 1 is the packing alone; more ranks are processes, or all of them run on one device.
    With the op `incremental_gather` only the chunk's own records are new, and they are put into resident buffers.
    """

    op: str
    rows: int
    context: int
    world: int
    layout: str = "fp8_mla_nope"

    @property
    def record_bytes(self) -> int:
        return LAYOUTS[self.layout].record_bytes

    @property
    def bytes(self) -> int:
        """Fewest bytes through memory: lists and slots once; records read once and written once on every rank."""
        if self.op == "c4_remap":
            return 2 * self.rows * C4_TOPK * INDEX_BYTES
        if self.op == "c4_plan_gather":
            return (self.context // self.world + 2 * self.rows) * INDEX_BYTES
        tokens = self.rows if self.op == INCREMENTAL_GATHER else self.context
        return 2 * self.world * tokens * self.record_bytes

    @property
    def flops(self) -> int:
        return 0

    def fields(self) -> dict:
        return {
            "op": self.op,
            "rows": self.rows,
            "context": self.context,
            "world": self.world,
            "layout": self.layout,
            "record_bytes": self.record_bytes,
        }


@dataclass(frozen=True)
class SelectShape:
    """One `c4_select` call of `rows` query rows at the end of one prompt of `context` tokens, on one rank."""

    rows: int
    context: int
    heads: int = 32
    pools: int = 512

    @property
    def visible(self) -> int:
        """Pools that all rows see together."""
        return sum(position // 4 for position in range(self.context - self.rows + 1, self.context + 1))

    @property
    def bytes(self) -> int:
        """Fewest bytes through memory: queries, pooled keys and candidates once."""
        query = self.heads * (C4_HEAD_DIM + FP32_BYTES)
        return self.rows * (query + 8 * self.pools) + self.context // 4 * (C4_HEAD_DIM + FP32_BYTES)

    @property
    def flops(self) -> int:
        return 2 * self.visible * self.heads * C4_HEAD_DIM

    def fields(self) -> dict:
        return {"rows": self.rows, "context": self.context, "heads": self.heads, "topk": 4 * self.pools}


@dataclass(frozen=True)
class SplitSelectShape:
    """The selection of one rank of `world`, in a chunk of `rows` query rows at the end of one prompt."""

    rows: int
    context: int
    world: int = 4
    heads: int = 32
    pools: int = 512

    @property
    def one_rank(self) -> SelectShape:
        """What all ranks compute together, as if one rank did it."""
        return SelectShape(self.rows, self.context, self.heads, self.pools)

    @property
    def bytes(self) -> int:
        return self.one_rank.bytes // self.world

    @property
    def flops(self) -> int:
        return self.one_rank.flops // self.world

    def fields(self) -> dict:
        return {"op": "split_select", **self.one_rank.fields(), "world": self.world}


INCREMENTAL_GATHER = "incremental_gather"
C4_TOPK = 2051
C4_HEAD_DIM = 128
C4_ROWS = (512, 2_048, 4_096, 8_192)
C4_CONTEXTS = (8_192, 32_768, 131_072, 524_288)
C4_CHUNK_ROWS = 4_096


def gather_grid(device_type: str, quick: bool) -> list[GatherShape]:
    """Packing and moving depend on the context, remapping on the rows: no product of both."""
    if quick or device_type == "cpu":
        return [GatherShape(INCREMENTAL_GATHER, 128, 1_024, 4)] + [
            GatherShape(op, 512, 8_192, world)
            for op, world in (("c4_prefill_gather", 1), ("c4_plan_gather", 4), ("c4_remap", 4))
        ]
    gathers = [GatherShape("c4_prefill_gather", 512, context, w) for w, context in product((1, 4), C4_CONTEXTS)]
    gathers += [
        GatherShape(INCREMENTAL_GATHER, rows, context, 4)
        for context, rows in product(C4_CONTEXTS, (512, 4_096))
        if rows < context
    ]
    plans = [GatherShape("c4_plan_gather", 8_192, context, 4) for context in C4_CONTEXTS]
    return gathers + plans + [GatherShape("c4_remap", rows, 131_072, 4) for rows in C4_ROWS]


def ranks_gather_grid(device_type: str, quick: bool, world: int) -> list[GatherShape]:
    """Ranks that are processes: of each context all that there is, and what chunks add. What tells most comes first."""
    if device_type == "cpu":
        return [GatherShape(op, 128, 1_024, world) for op in ("c4_prefill_gather", INCREMENTAL_GATHER)]
    contexts, rows = (131_072, 8_192, 524_288, 32_768), (C4_CHUNK_ROWS, 512)
    if quick:
        contexts, rows = contexts[:2], rows[:1]
    found = []
    for context in contexts:
        found.append(GatherShape("c4_prefill_gather", C4_CHUNK_ROWS, context, world))
        found += [GatherShape(INCREMENTAL_GATHER, r, context, world) for r in rows]
    return found


def select_grid(device_type: str, quick: bool) -> list[SelectShape]:
    if quick or device_type == "cpu":
        return [SelectShape(8, 4_096)]
    decode = [SelectShape(rows, context) for context, rows in product(C4_CONTEXTS[1:], (1, 4, 32))]
    prefill = [SelectShape(rows, context) for context, rows in product(C4_CONTEXTS, C4_ROWS) if rows <= context]
    return decode + [shape for shape in prefill if shape.flops < 5e12]


def split_select_grid(device_type: str, quick: bool) -> list[SplitSelectShape]:
    if quick or device_type == "cpu":
        return [SplitSelectShape(8, 1_024)]
    shapes = [SplitSelectShape(rows, context) for context, rows in product(C4_CONTEXTS, (512, 4_096))]
    return [shape for shape in shapes if shape.world * shape.flops < 5e12]
