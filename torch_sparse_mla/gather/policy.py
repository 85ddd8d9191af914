"""Whether a batch's prefill gathers records or takes the ordinary DCP path: host integers only, the same on every rank.

The gather moves the context, ordinary DCP moves query heads and partial results of every row. So a long context under
few rows is dear to gather, whatever fits into the workspace; the published form has no such gate. The incremental
form moves a context once, whatever the number of chunks; it takes a resident buffer in every layer.

The selector has two forms too: candidates of every row travel, or pooled keys of the context and then what each rank
selected for its share of the rows (`indexer.row_split`). Again one is dear with many rows, the other with much context.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from ..contract import check_layout
from ..errors import reject
from ..records.layouts import LATENT_DIM
from .geometry import PageGeometry
from .plan import GatherPlan, checked_integers, checked_lengths

if TYPE_CHECKING:
    from ..indexer.row_split import RowSplit

GATHER, ORDINARY = "gather", "ordinary"
FULL, INCREMENTAL, AUTO = "full", "incremental", "auto"
MERGE, ROWS = "merge", "rows"
REASONS = {
    "eligible": "the gather is possible and costs less",
    "provisional_geometry": "the page size is not frozen; call PageGeometry.freeze before serving",
    "capturing": "a CUDA graph is being captured; the gather runs in eager mode",
    "decode_tokens": "the batch has decode tokens, MTP verification among them",
    "no_rows": "the batch has no query rows",
    "requests": "more requests than reserved; raise max_requests",
    "rows": "more query rows than reserved; raise max_rows",
    "capacity": "the padded slice exceeds the workspace; raise max_tokens",
    "cost": "ordinary DCP costs less: too much context for so few rows",
}
FORM_REASONS = {
    "off": "records='full'",
    "resident": "every request of the batch is resident",
    "not_resident": "a request was not admitted, or outgrew its place: all visible records travel",
}
ADMISSION_REASONS = {
    "off": "records='full'",
    "asked": "records='incremental'",
    "pays": "the chunks of the prompt cost less together",
    "does_not_pay": "the chunks of the prompt cost no less together: too few of them",
}
SELECT_REASONS = {
    "eligible": "splitting the rows is possible, and costs less or is asked for",
    "off": "select='merge'",
    "provisional_geometry": REASONS["provisional_geometry"],
    "capturing": "a CUDA graph is being captured; rows are split in eager mode",
    "decode_tokens": REASONS["decode_tokens"],
    "no_rows": REASONS["no_rows"],
    "requests": "more requests than reserved; raise RowSplit.requests",
    "rows": "more query rows than reserved; raise RowSplit.rows",
    "capacity": "the index pages exceed what is reserved; raise RowSplit.max_tokens",
    "cost": "merging candidates costs no more: too much context for so few rows",
}
_BFLOAT16_BYTES = 2
_LSE_BYTES = 4


@dataclass(frozen=True)
class GatherCosts:
    """Measured figures of the link, in microseconds. All that counts by default is the number of bytes received.

    Attributes:
        us_per_byte: a byte that a rank receives.
        hop_us: an exchange that moves next to nothing.
        copy_us_per_byte: a byte that a rank copies in its own memory, as it packs and as records arrive.
    """

    us_per_byte: float = 1.0
    hop_us: float = 0.0
    copy_us_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # Written so that NaN fails.
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                reject("GatherCosts", field.name, repr(value), "finite, 0 or more")


class GatherChoice(NamedTuple):
    """What a batch's sparse layers do.

    Attributes:
        path: "gather" or "ordinary".
        reason: a key of `REASONS`.
        padded: records of a rank's slice; 0 where it was not computed.
        gather_bytes, ordinary_bytes: bytes that a rank receives in each layer.
        gather_us, ordinary_us: predicted times of a layer's communication.
        records: the form of the gather, "full" or "incremental": what `padded`, `gather_bytes` and `gather_us` are of.
        records_reason: a key of `FORM_REASONS`; None where the gather was not considered.
    """

    path: str
    reason: str
    padded: int = 0
    gather_bytes: int = 0
    ordinary_bytes: int = 0
    gather_us: float = 0.0
    ordinary_us: float = 0.0
    records: str = FULL
    records_reason: str | None = None

    @property
    def gathers(self) -> bool:
        return self.path == GATHER


class SelectChoice(NamedTuple):
    """How a batch's selections come together.

    Attributes:
        path: "merge", of candidates, or "rows", split by rank.
        reason: a key of `SELECT_REASONS`.
        merge_bytes, rows_bytes: bytes that a rank receives in each layer; 0 where they were not computed.
        merge_us, rows_us: predicted times of a layer's communication.
    """

    path: str
    reason: str
    merge_bytes: int = 0
    rows_bytes: int = 0
    merge_us: float = 0.0
    rows_us: float = 0.0

    @property
    def splits(self) -> bool:
        return self.path == ROWS


class GatherPolicy:
    """Chooses for each batch, and counts what it chose. Every rank must be given the same numbers.

    Args:
        geometry: of the caches.
        sizes: the reserved sizes, `Workspace.sizes`; None while the geometry is provisional: set the attribute then.
        layout: a key of `torch_sparse_mla.LAYOUTS`.
        heads: query heads of all ranks together.
        costs: measured figures; None: the number of bytes decides.
        records: "full"; "incremental" where every request of a batch is resident; or "auto", the same, but `admits`
            takes only requests whose prompt costs less that way. Nothing else.
        select: "merge"; "rows" wherever it is possible; or "auto", where it costs less too. Nothing else.
        split: the sizes of a `SplitSelector`, for select other than "merge".
    """

    def __init__(
        self,
        geometry: PageGeometry,
        sizes: GatherPlan | None,
        *,
        layout: str,
        heads: int,
        costs: GatherCosts | None = None,
        records: str = FULL,
        select: str = MERGE,
        split: "RowSplit | None" = None,
    ) -> None:
        self.layout = check_layout("GatherPolicy", layout)
        if not isinstance(heads, int) or heads < 1 or (sizes is not None and heads % sizes.world):
            reject("GatherPolicy", "heads", repr(heads), "the heads of all ranks: a positive multiple of the world")
        if sizes is None and geometry.frozen:
            reject("GatherPolicy", "sizes", None, "Workspace.sizes, since the geometry is frozen")
        if costs is not None and not isinstance(costs, GatherCosts):
            reject("GatherPolicy", "costs", repr(costs), "None or GatherCosts")
        if records not in (FULL, INCREMENTAL, AUTO):
            reject("GatherPolicy", "records", repr(records), f"{FULL}, {INCREMENTAL} or {AUTO}")
        if select not in (MERGE, ROWS, AUTO):
            reject("GatherPolicy", "select", repr(select), f"{MERGE}, {ROWS} or {AUTO}")
        if (split is None) != (select == MERGE):
            given = f"{'None' if split is None else 'sizes'} with select={select!r}"
            reject("GatherPolicy", "split", given, "the sizes of a SplitSelector, or None with select='merge'")
        if split is not None and sizes is not None and getattr(split, "world", None) != sizes.world:
            reject("GatherPolicy", "split", repr(split), f"RowSplit of {sizes.world} ranks, those of sizes")
        self.select, self.split = select, split
        self.geometry, self.sizes, self.heads, self.records = geometry, sizes, heads, records
        self.costs = costs or GatherCosts()
        self.counts: collections.Counter[str] = collections.Counter()
        self.form_counts: collections.Counter[str] = collections.Counter()
        self.admission_counts: collections.Counter[str] = collections.Counter()
        self.select_counts: collections.Counter[str] = collections.Counter()
        self.last: GatherChoice | None = None
        self.last_select: SelectChoice | None = None

    def choose(
        self,
        lengths: Sequence[int],
        new_lengths: Sequence[int],
        *,
        num_decode_tokens: int,
        capturing: bool = False,
        resident_lengths: Sequence[int] | None = None,
    ) -> GatherChoice:
        """The path of one batch.

        Args:
            lengths: global length of each request, cached and new tokens together.
            new_lengths: query rows of each request.
            num_decode_tokens: of the whole batch, MTP verification included; the gather is for pure prefill.
            capturing: whether a CUDA graph is being captured.
            resident_lengths: `Residency.resident_lengths` of the batch; None: not all of it is resident.
        Raises: ValueError for numbers that cannot be, or resident ones with records="full". The choice is counted under
            its reason, and so is the form.
        """
        lengths, new_lengths = _checked_batch(lengths, new_lengths, num_decode_tokens)
        resident_lengths = self._checked_resident(lengths, new_lengths, resident_lengths)
        self.last = self._choose(lengths, sum(new_lengths), num_decode_tokens, capturing, resident_lengths)
        self.counts[self.last.reason] += 1
        if self.last.records_reason:
            self.form_counts[self.last.records_reason] += 1
        return self.last

    def choose_select(
        self,
        lengths: Sequence[int],
        new_lengths: Sequence[int],
        *,
        num_decode_tokens: int,
        capturing: bool = False,
    ) -> SelectChoice:
        """How the selections of one batch come together; the arguments are those of `choose`.

        Raises: ValueError for numbers that cannot be. The choice is counted under its reason.
        """
        lengths, new_lengths = _checked_batch(lengths, new_lengths, num_decode_tokens)
        self.last_select = self._choose_select(lengths, sum(new_lengths), num_decode_tokens, capturing)
        self.select_counts[self.last_select.reason] += 1
        return self.last_select

    def admits(self, max_length: int, chunk_rows: int, cached: int = 0) -> bool:
        """Whether a request is worth a place in the resident buffers, before its first chunk.

        Args:
            max_length: tokens of the prompt.
            chunk_rows: rows of a chunk of it.
            cached: tokens that a prefix hit brings: the first chunk sends them too.
        Raises: ValueError for lengths that cannot be. The answer is counted under its reason.
        """
        for name, value, least in (("max_length", max_length, 1), ("chunk_rows", chunk_rows, 1), ("cached", cached, 0)):
            if not isinstance(value, int) or value < least or (name == "cached" and value > max_length):
                reject("GatherPolicy", name, repr(value), f"an integer, {least} or more; cached up to max_length")
        if self.records == AUTO:
            reason = "pays" if self._pays(max_length, chunk_rows, cached) else "does_not_pay"
        else:
            reason = "off" if self.records == FULL else "asked"
        self.admission_counts[reason] += 1
        return reason in ("asked", "pays")

    def explain(self) -> dict[str, object]:
        """The last choice with its reason, how often each reason came up, and the costs behind it."""
        last = self.last
        return {
            "path": last.path if last else None,
            "why": REASONS[last.reason] if last else "no batch yet",
            "last": last._asdict() if last else None,
            "counts": {reason: self.counts[reason] for reason in REASONS},
            "records": {
                "flag": self.records,
                "why": FORM_REASONS[last.records_reason] if last and last.records_reason else "no gather considered",
                "counts": {reason: self.form_counts[reason] for reason in FORM_REASONS},
                "admissions": {reason: self.admission_counts[reason] for reason in ADMISSION_REASONS},
            },
            "select": {
                "flag": self.select,
                "why": SELECT_REASONS[self.last_select.reason] if self.last_select else "no batch yet",
                "last": self.last_select._asdict() if self.last_select else None,
                "counts": {reason: self.select_counts[reason] for reason in SELECT_REASONS},
            },
            "costs": {field.name: getattr(self.costs, field.name) for field in fields(self.costs)},
            "geometry": repr(self.geometry),
        }

    def _choose(
        self,
        lengths: Sequence[int],
        rows: int,
        num_decode_tokens: int,
        capturing: bool,
        resident_lengths: Sequence[int] | None,
    ) -> GatherChoice:
        sizes = self.sizes
        provisional = sizes is None or not self.geometry.frozen
        reason = _no_prefill(provisional, rows, num_decode_tokens, capturing)
        if reason is not None:
            return GatherChoice(ORDINARY, reason)
        if resident_lengths is None:
            form, why = FULL, "off" if self.records == FULL else "not_resident"
            padded = sizes.host_padded(lengths)
        else:
            form, why = INCREMENTAL, "resident"
            padded = max(sizes.host_sent(lengths, resident_lengths))
        costs = self._costs(padded, rows, form)
        limits = {
            "requests": len(lengths) > sizes.requests,
            "rows": rows > sizes.rows,
            "capacity": padded > sizes.capacity,
            "cost": costs[2] > costs[3],
        }
        reason = next((reason for reason, applies in limits.items() if applies), "eligible")
        return GatherChoice(GATHER if reason == "eligible" else ORDINARY, reason, padded, *costs, form, why)

    def _choose_select(
        self, lengths: Sequence[int], rows: int, num_decode_tokens: int, capturing: bool
    ) -> SelectChoice:
        split = self.split
        reason = _no_prefill(not self.geometry.frozen, rows, num_decode_tokens, capturing)
        reason = "off" if self.select == MERGE else reason
        if reason is not None:
            return SelectChoice(MERGE, reason)
        others = split.world - 1
        gathered = (split.candidate_bytes(rows), split.gathered_bytes(lengths, rows))
        received = tuple(size // split.world * others for size in gathered)
        # Every byte is copied once, as it is packed or as it arrives.
        hop = self.costs.hop_us if others else 0.0
        times = [
            hops * hop + moved * self.costs.us_per_byte + size * self.costs.copy_us_per_byte
            for hops, moved, size in zip((1, 2), received, gathered, strict=True)
        ]
        limits = {
            "requests": len(lengths) > split.requests,
            "rows": rows > split.rows,
            "capacity": not split.fits(lengths),
            "cost": self.select == AUTO and times[1] >= times[0],
        }
        reason = next((reason for reason, applies in limits.items() if applies), "eligible")
        return SelectChoice(ROWS if reason == "eligible" else MERGE, reason, *received, *times)

    def _costs(self, padded: int, rows: int, form: str) -> tuple[int, int, float, float]:
        world, costs = self.sizes.world, self.costs
        gathered = gather_bytes(padded, self.layout.record_bytes, world)
        ordinary = ordinary_bytes(rows, self.heads, self.layout.query_dim, world)
        hop = costs.hop_us if world > 1 else 0.0
        return gathered, ordinary, self._gather_us(padded, form), 2 * hop + ordinary * costs.us_per_byte

    def _gather_us(self, records: int, form: str, calls: int = 1) -> float:
        """Of `calls` gathers that have so many records in a slice, all together."""
        world, costs, record_bytes = self.sizes.world, self.costs, self.layout.record_bytes
        # Own records are packed, and those of peers are copied once more as they arrive; then all are put in place.
        copies = 2 if form == INCREMENTAL else 1
        copied = copies * world * records * record_bytes
        hops = calls * costs.hop_us if world > 1 else 0.0
        moved = gather_bytes(records, record_bytes, world)
        return hops + moved * costs.us_per_byte + copied * costs.copy_us_per_byte

    def _pays(self, max_length: int, chunk_rows: int, cached: int) -> bool:
        """The full form sends the first token in every chunk, the incremental one once. Padding is left out."""
        if self.sizes is None:
            return False
        chunks = max(1, -(-(max_length - cached) // chunk_rows))
        tokens = (chunks - 1) * cached + chunks * (chunks - 1) // 2 * chunk_rows + max_length
        full, once = (-(-count // self.sizes.world) for count in (tokens, max_length))
        return self._gather_us(once, INCREMENTAL, chunks) < self._gather_us(full, FULL, chunks)

    def _checked_resident(
        self, lengths: Sequence[int], new_lengths: Sequence[int], resident_lengths: Sequence[int] | None
    ) -> list[int] | None:
        if resident_lengths is None:
            return None
        if self.records == FULL:
            reject(
                "GatherPolicy", "resident_lengths", "a list", "None with records='full'; make the policy with another"
            )
        if len(resident_lengths) != len(lengths):
            given = f"{len(resident_lengths)} requests"
            reject("GatherPolicy", "resident_lengths", given, f"{len(lengths)} requests, as many as 'lengths'")
        resident = checked_integers("GatherPolicy", "resident_lengths", resident_lengths)
        for request, (length, new, known) in enumerate(zip(lengths, new_lengths, resident, strict=True)):
            if not 0 <= known <= length - new:
                allowed = f"0 to {length - new}, the tokens before the chunk"
                reject("GatherPolicy", "resident_lengths", f"{known} in request {request}", allowed)
        return resident


def gather_bytes(padded: int, record_bytes: int, world: int) -> int:
    """Bytes that a rank receives when slices of `padded` records are gathered."""
    return (world - 1) * padded * record_bytes


def ordinary_bytes(rows: int, heads: int, query_dim: int, world: int) -> int:
    """Bytes that a rank receives in ordinary DCP: the peers' query heads in bf16, then partial outputs and LSEs."""
    per_head = _BFLOAT16_BYTES * (query_dim + LATENT_DIM) + _LSE_BYTES
    return rows * (world - 1) * (heads // world) * per_head


def _no_prefill(provisional: bool, rows: int, num_decode_tokens: int, capturing: bool) -> str | None:
    """Why a batch is none that may gather, whatever its sizes; None: it may."""
    checks = {
        "provisional_geometry": provisional,
        "capturing": capturing,
        "decode_tokens": num_decode_tokens != 0,
        "no_rows": rows == 0,
    }
    return next((reason for reason, applies in checks.items() if applies), None)


def _checked_batch(
    lengths: Sequence[int], new_lengths: Sequence[int], num_decode_tokens: int
) -> tuple[list[int], list[int]]:
    if not isinstance(num_decode_tokens, int) or num_decode_tokens < 0:
        reject("GatherPolicy", "num_decode_tokens", repr(num_decode_tokens), "an integer, 0 or more")
    return checked_lengths("GatherPolicy", lengths, new_lengths)
