"""Measures, at warm-up, the figures that the cost model needs, and lets all ranks agree on them."""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from .. import sharding
from ..decode.api import merge_partial_attention
from ..exchange.group import as_group
from ..records.layouts import LATENT_DIM
from ..selection.api import plan_selection, selected_slots
from ..selection.plan import SelectionPlan
from .costs import LinkCosts
from .gather import Gather
from .peers import PeerCaches
from .rank import Rank
from .steps import Steps, finish

PROBE_RECORDS = 512
PROBE_RECORD_BYTES = 1024
CALLS = 5
# A rank may still compile the kernels of an exchange while its peers wait.
COMPILE_TIMEOUT_S = 60.0
# 0.3 ms of a 2 GHz clock: longer than the host takes for a launch, checks included.
HOLD_CYCLES_PER_LAUNCH = 600_000


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A full-size step over records of zeros; every request has the pages 0, 1, 2 and so on."""

    q: torch.Tensor
    cache: torch.Tensor
    topk: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor | None

    @staticmethod
    def make(rank: Rank, device: torch.device, cache: torch.Tensor | None = None) -> "Inputs":
        """Args: cache: one of `pages` pages; None: a new one."""
        sizes, layout, pages = rank.sizes, rank.layout, Inputs.pages(rank)
        positions = torch.arange(sizes.topk, dtype=torch.int32, device=device)
        # The CPU encodes no float64.
        states = torch.zeros(sizes.rows, layout.query_dim, dtype=torch.float32, device=device)
        if cache is None:
            cache = torch.zeros(pages, rank.page_size, layout.record_bytes, dtype=torch.uint8, device=device)
        return Inputs(
            q=torch.zeros(sizes.rows, sizes.heads, layout.query_dim, dtype=rank.dtype, device=device),
            cache=cache,
            topk=positions.repeat(sizes.rows, 1),
            block_table=torch.arange(pages, dtype=torch.int32, device=device).repeat(sizes.requests, 1),
            lengths=torch.full((sizes.rows,), sizes.topk, dtype=torch.int32, device=device),
            latent=states[:, :LATENT_DIM],
            rope=states[:, LATENT_DIM:] if layout.rope else None,
        )

    @staticmethod
    def pages(rank: Rank) -> int:
        return sharding.local_length(0, rank.sizes.topk, rank.world, rank.interleave) // rank.page_size + 1


class Stopwatch:
    """The median time that a piece of work takes on this rank, in parts, over several rounds.

    On a GPU it is device time, as in a graph: the device is held back first, so that launches are ahead of it.
    """

    def __init__(self, device: torch.device, launches: int) -> None:
        """Args: launches: how many, of all ranks of this thread, come behind."""
        self.device = device
        self.rounds: list[list[tuple]] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            with torch.cuda.device(device):
                torch.cuda._sleep(launches * HOLD_CYCLES_PER_LAUNCH)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A part of the last round."""
        began = self._mark()
        yield
        self.rounds[-1].append((began, self._mark()))

    def median_us(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        # The first round pays for ranks that begin at different times.
        return statistics.median(sum(self._us(*part) for part in parts) for parts in self.rounds[1:])

    def _mark(self) -> "float | torch.cuda.Event":
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _us(self, began, ended) -> float:
        return 1e6 * (ended - began) if isinstance(began, float) else 1e3 * began.elapsed_time(ended)


def agreed_costs(
    name: str,
    rank: Rank,
    device: torch.device,
    given: LinkCosts | None,
    union_growth: float | None,
    peers: PeerCaches | None,
    bulk_flag: bool,
) -> Steps[LinkCosts]:
    """Given or measured costs, each figure the highest of all ranks. Collective.

    Args:
        union_growth: instead of the one in the costs.
        peers: where caches of all ranks can be read; None: nowhere.
        bulk_flag: what this rank's environment says, which must be what every rank's says.
    """
    # Also where costs are given: kernels that one rank compiles later than another would run into timeouts.
    figures = as_group(rank.group).agree(f"{name}.costs", "measure", lambda: _measure_device(rank, device))
    peer_us = None
    if peers is not None:
        allocation = peers.probe(Inputs.pages(rank), rank.page_size, rank.sizes.record_bytes)
        # Nobody lets go of memory before everybody has read it.
        peer_us = as_group(rank.group).agree(
            f"{name}.costs", "read peers", lambda: _measure_peers(rank, allocation.caches)
        )
        del allocation
    patient = rank.channel_options | {"timeout_s": max(rank.channel_options["timeout_s"], COMPILE_TIMEOUT_S)}
    probing = dataclasses.replace(rank, channel_options=patient)
    probe = Gather(f"{name}.probe", probing, PROBE_RECORDS, PROBE_RECORD_BYTES, device)
    try:
        link = yield from _measure_link(probe, rank, device)
        measured = LinkCosts(
            *link[:2], *figures[:2], plan_us=figures[2], slots_us=figures[3], cover_us=link[2], attend_peers_us=peer_us
        )
        costs = measured if given is None else given
        if union_growth is not None:
            costs = dataclasses.replace(costs, union_growth=union_growth)
        # Float64 words of one probe record.
        words = torch.zeros(1, PROBE_RECORD_BYTES // 8, dtype=torch.float64, device="cpu")
        own = [math.nan if figure is None else figure for figure in (*dataclasses.astuple(costs), float(bulk_flag))]
        words[0, : len(own)] = torch.tensor(own, dtype=torch.float64, device="cpu")
        told = (yield from probe.run(words.to(device)))[:, 0, : len(own)].cpu()
        # Ranks that share a thread: nobody leaves before everybody has read.
        yield
    finally:
        probe.close()
    if told[:, -1].unique().numel() > 1:
        flags = {number: int(flag) for number, flag in enumerate(told[:, -1].tolist())}
        raise ValueError(
            f"torch_sparse_mla: environment variable TORCH_SPARSE_MLA_BULK_PREFETCH: got {flags} by rank; allowed: the "
            "same on every rank"
        )
    # The highest figure of all ranks; NaN, which spreads, where one rank has none.
    highest = told[:, :-1].amax(0).tolist()
    return LinkCosts(*(None if math.isnan(figure) else figure for figure in highest))


def _measure_link(probe: Gather, rank: Rank, device: torch.device) -> Steps[tuple[float, float, float]]:
    """Time of an exchange of next to nothing, of each further byte, and how much of it attention hides."""
    inputs = Inputs.make(rank, device)
    records, workspace = _records(rank, device), rank.workspace(rank.sizes.rows, rank.sizes.heads, device)
    few = torch.zeros(1, PROBE_RECORD_BYTES, dtype=torch.uint8, device=device)
    many = few.repeat(PROBE_RECORDS, 1)

    def attend() -> None:
        rank.attend(inputs.q, records, inputs.topk, workspace=workspace)

    hop = yield from _time_gather(probe, few)
    full = yield from _time_gather(probe, many)
    beside = yield from _time_gather(probe, many, attend)
    hidden = full + _time(attend, device) - beside
    received = (rank.world - 1) * many.numel()
    return hop, max(full - hop, 0.0) / max(received, 1), max(hidden, 0.0)


def _time_gather(probe: Gather, rows: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> Steps[float]:
    """Median of this rank's own part: not what other ranks do on this thread in between."""
    # Every form once, for what is compiled or planned at its first call.
    yield from probe.run(rows)
    # Push and wait, and up to two launches of what is beside them.
    watch = Stopwatch(rows.device, 4 * CALLS * probe.rank.world)
    for _ in range(CALLS):
        watch.rounds.append([])
        gather = probe.run(rows)
        with watch.running():
            next(gather)
            if meanwhile is not None:
                meanwhile()
        yield
        with watch.running():
            finish(gather)
    return watch.median_us()


def _records(rank: Rank, device: torch.device) -> torch.Tensor:
    """As many records as a top-k list, in one page."""
    return torch.zeros(1, rank.sizes.topk, rank.sizes.record_bytes, dtype=torch.uint8, device=device)


def _measure_device(rank: Rank, device: torch.device) -> tuple[float, ...]:
    """Attention in both forms, planning, and looking up slots."""
    inputs, sizes, world = Inputs.make(rank, device), rank.sizes, rank.world
    records = _records(rank, device)
    own = inputs.topk.repeat(world, 1)
    share = sharding.local_length(0, sizes.topk, world, rank.interleave)
    shares = torch.full((len(own),), share, dtype=torch.int32, device=device)
    all_q = inputs.q.repeat(world, 1, 1)
    selection = SelectionPlan(sizes.requests, sizes.rows_per_request, sizes.topk, world)
    plan, slots, counts = selection.empty(device), torch.empty_like(own), torch.empty_like(shares)
    workspace = rank.workspace(world * sizes.rows, sizes.heads, device)

    def attend_owner() -> None:
        out, lse = rank.attend(all_q, records, own, workspace=workspace, lengths=shares)
        if world > 1:
            shape = (world, sizes.rows, sizes.heads)
            merge_partial_attention(out.view(*shape, LATENT_DIM), lse.view(shape))

    def look_up() -> None:
        lists = (inputs.topk, inputs.block_table, inputs.lengths)
        selected_slots(*lists, **rank.geometry, world=world, slots=slots, counts=counts)

    return tuple(
        _time(action, device)
        for action in (
            lambda: rank.attend(inputs.q, records, inputs.topk, workspace=workspace),
            attend_owner,
            lambda: plan_selection(inputs.topk, inputs.block_table, selection, plan=plan, **rank.geometry),
            look_up,
        )
    )


def _measure_peers(rank: Rank, caches: list[torch.Tensor]) -> float:
    """Attention of the local heads over the caches of all ranks, where they lie."""
    device = caches[0].device
    inputs = Inputs.make(rank, device, caches[0])
    slots_per_rank = caches[0].shape[0] * rank.page_size
    slots = selected_slots(
        inputs.topk,
        inputs.block_table,
        inputs.lengths,
        **rank.geometry,
        world=rank.world,
        slots_per_rank=slots_per_rank,
    )
    workspace = rank.workspace(rank.sizes.rows, rank.sizes.heads, device)
    return _time(lambda: rank.attend(inputs.q, caches, slots, workspace=workspace), device)


def _time(action: Callable[[], object], device: torch.device) -> float:
    """Median microseconds of a call, after one that may have to compile."""
    action()
    watch = Stopwatch(device, 4 * CALLS)
    for _ in range(CALLS):
        watch.rounds.append([])
        with watch.running():
            action()
    return watch.median_us()
