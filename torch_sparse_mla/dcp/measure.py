"""Measures, at warm-up, the figures that the cost model needs, and lets all ranks agree on them."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import torch

from .. import sharding
from ..decode.api import merge_partial_attention
from ..exchange.group import LoopbackRank, as_group
from ..records.api import write_ckv_records
from ..records.layouts import LATENT_DIM
from ..selection.api import current_token_slots, plan_selection, selected_slots
from ..selection.plan import SelectionPlan
from .costs import ASSUMED_UNION_GROWTH, LinkCosts, moved_bytes
from .gather import Gather, Partials
from .peers import PeerCaches
from .rank import Rank
from .steps import Steps, finish

# The probe is as large as what a rank sends in one exchange of a layer, within these limits: bytes that are few are
# hidden by latencies, and memory for many is not there.
PROBE_RECORDS = (512, 4096)
PROBE_RECORD_BYTES = 1024
# And calls in a round. On a CPU no call waits for its launch, and a call takes so long that one will do.
ROUNDS, CALLS = {"cuda": 3, "cpu": 1}, {"cuda": 5, "cpu": 1}
# A rank may still compile the kernels of an exchange while its peers wait.
COMPILE_TIMEOUT_S = 60.0
# 0.3 ms of a 2 GHz clock: longer than the host takes for a launch, checks included.
HOLD_CYCLES_PER_LAUNCH = 600_000
# The most that anything timed by itself takes.
LAUNCHES = 10


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
    """Time of a call among calls that follow one another without a pause, as in a graph: the median of several rounds.

    On a GPU it is device time: the device is held back first, so that launches are ahead of it. A mark between two
    calls would cost as much as a small kernel, so there are marks around the calls of a round only.
    """

    def __init__(self, device: torch.device, launches: int, sharing: int = 1) -> None:
        """Args: launches: of one call. sharing: ranks that take turns on this thread, each with a call."""
        self.device, self.sharing = device, sharing
        self.rounds, self.calls = ROUNDS[device.type], CALLS[device.type]
        self.marks: list[float | torch.cuda.Event] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            with torch.cuda.device(device):
                torch.cuda._sleep(self.rounds * (1 + self.calls) * launches * sharing * HOLD_CYCLES_PER_LAUNCH)

    def mark(self) -> None:
        """Before and after the calls of each round."""
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append(event)

    def us(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        rounds = zip(self.marks[::2], self.marks[1::2], strict=True)
        return statistics.median(self._us(*marks) for marks in rounds) / (self.calls * self.sharing)

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
    messages: bool = False,
) -> Steps[LinkCosts]:
    """Given or measured costs, each figure the highest of all ranks. Collective.

    Args:
        union_growth: instead of the one in the costs.
        peers: where caches of all ranks can be read; None: nowhere.
        bulk_flag: what this rank's environment says, which must be what every rank's says.
        messages: whether the group's own collectives are another way to move what owner_merge moves.
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
    moves = [None, None]
    if messages and given is None and rank.world > 1:
        for place, sends in enumerate((False, True)):
            way = dataclasses.replace(probing, sends_messages=sends)
            moves[place] = yield from _measure_moves(f"{name}.moves{place}", way, device, figures["attend_owner_us"])
    probe = Gather(f"{name}.probe", probing, probe_records(rank), PROBE_RECORD_BYTES, device)
    try:
        link = yield from _measure_link(probe, rank, device)
        measured = LinkCosts(**link, **figures, attend_peers_us=peer_us, moves_us=moves[0], moves_nccl_us=moves[1])
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


def probe_records(rank: Rank) -> int:
    least, most = PROBE_RECORDS
    # The union of costs that are not known yet; of the size, only the order matters.
    return min(max(math.ceil(moved_bytes(rank.sizes, ASSUMED_UNION_GROWTH) / PROBE_RECORD_BYTES), least), most)


def _measure_link(probe: Gather, rank: Rank, device: torch.device) -> Steps[dict[str, float]]:
    """Time of an exchange of next to nothing, of each further byte, and how much of it attention hides."""
    inputs = Inputs.make(rank, device)
    records, workspace = _records(rank, device), rank.workspace(rank.sizes.rows, rank.sizes.heads, device)
    few = torch.zeros(1, PROBE_RECORD_BYTES, dtype=torch.uint8, device=device)
    many = few.repeat(probe_records(rank), 1)

    def attend() -> None:
        rank.attend(inputs.q, records, inputs.topk, workspace=workspace)

    hop = yield from _time_gather(probe, few)
    full = yield from _time_gather(probe, many)
    beside = yield from _time_gather(probe, many, attend)
    hidden = full + _time(attend, device) - beside
    received = (rank.world - 1) * many.numel()
    return {
        "hop_us": hop,
        "us_per_byte": max(full - hop, 0.0) / max(received, 1),
        "cover_us": max(hidden, 0.0),
    }


def _measure_moves(name: str, rank: Rank, device: torch.device, attend_owner_us: float) -> Steps[float]:
    """What an owner_merge layer takes beyond its attention and merge: kernels of moves meet those of attention here as
    they do in a step, where NCCL's are not as long as one after another."""
    inputs, sizes = Inputs.make(rank, device), rank.sizes
    records, (own, shares) = _records(rank, device), _owner_lists(inputs, rank)
    q = inputs.q.view(sizes.rows * sizes.heads, -1)
    workspace = rank.workspace(rank.world * sizes.rows, sizes.heads, device)
    queries = Gather(f"{name}.queries", rank, len(q), sizes.query_bytes, device)
    partials = None

    def layer() -> Steps[None]:
        all_q = yield from queries.run(q)
        into = partials.buffers(sizes.rows)
        rank.attend(all_q.view(-1, *inputs.q.shape[1:]), records, own, None, into, workspace, shares)
        merge_partial_attention(*(yield from partials.run(sizes.rows)))

    try:
        partials = Partials(f"{name}.partials", rank, device)
        # Launches: push and wait twice, or NCCL's and its copies; attention and merge.
        total = yield from _time_steps(layer, rank, device, 12)
        yield
    finally:
        for move in (queries, partials):
            if move is not None:
                move.close()
    return max(total - attend_owner_us, 0.0)


def _time_gather(probe: Gather, rows: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> Steps[float]:
    """Microseconds of a gather, with something else between its halves."""

    def gather() -> Steps[None]:
        halves = probe.run(rows)
        next(halves)
        if meanwhile is not None:
            meanwhile()
        yield
        finish(halves)

    # Push and wait, and up to two launches of what is beside them.
    return (yield from _time_steps(gather, probe.rank, rows.device, 4))


def _time_steps(call: Callable[[], Steps[None]], rank: Rank, device: torch.device, launches: int) -> Steps[float]:
    """Microseconds of a call of all ranks."""
    # Once for what is compiled or planned at the first call.
    yield from call()
    sharing = rank.world if isinstance(as_group(rank.group), LoopbackRank) else 1
    watch = Stopwatch(device, launches, sharing)
    for _ in range(watch.rounds):
        # Ranks begin a round together.
        yield from call()
        watch.mark()
        for _ in range(watch.calls):
            yield from call()
        watch.mark()
    return watch.us()


def _records(rank: Rank, device: torch.device) -> torch.Tensor:
    """As many records as a top-k list, in one page."""
    return torch.zeros(1, rank.sizes.topk, rank.sizes.record_bytes, dtype=torch.uint8, device=device)


def _owner_lists(inputs: Inputs, rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of the rows of all heads, and how much of them one rank owns."""
    own = inputs.topk.repeat(rank.world, 1)
    share = sharding.local_length(0, rank.sizes.topk, rank.world, rank.interleave)
    return own, torch.full((len(own),), share, dtype=torch.int32, device=own.device)


def _measure_device(rank: Rank, device: torch.device) -> dict[str, float]:
    """Attention in both forms, planning, looking up slots, and patching what was fetched ahead."""
    inputs, sizes, world = Inputs.make(rank, device), rank.sizes, rank.world
    records = _records(rank, device)
    own, shares = _owner_lists(inputs, rank)
    all_q = inputs.q.repeat(world, 1, 1)
    selection = SelectionPlan(sizes.requests, sizes.rows_per_request, sizes.topk, world)
    plan, slots, counts = selection.empty(device), torch.empty_like(own), torch.empty_like(shares)
    visible, targets = torch.empty_like(inputs.topk), torch.arange(sizes.rows, device=device).int() % sizes.topk
    absent = torch.full((), -1, dtype=torch.int32, device=device)
    workspace = rank.workspace(world * sizes.rows, sizes.heads, device)

    def attend_owner() -> None:
        out, lse = rank.attend(all_q, records, own, workspace=workspace, lengths=shares)
        if world > 1:
            shape = (world, sizes.rows, sizes.heads)
            merge_partial_attention(out.view(*shape, LATENT_DIM), lse.view(shape))

    def look_up() -> None:
        lists = (inputs.topk, inputs.block_table, inputs.lengths)
        selected_slots(*lists, **rank.geometry, world=world, slots=slots, counts=counts)

    def make_plan() -> None:
        torch.where(inputs.topk < inputs.lengths.unsqueeze(1), inputs.topk, absent, out=visible)
        plan_selection(visible, inputs.block_table, selection, plan=plan, **rank.geometry)

    def patch() -> None:
        current_token_slots(inputs.topk, inputs.lengths, selection, plan)
        for _ in range(sizes.shared_layers):
            write_ckv_records(inputs.latent, inputs.rope, targets, records, rank.layout.name)

    actions = {
        "attend_local_us": lambda: rank.attend(inputs.q, records, inputs.topk, workspace=workspace),
        "attend_owner_us": attend_owner,
        "plan_us": make_plan,
        "slots_us": look_up,
        "patch_us": patch,
    }
    return {name: _time(action, device) for name, action in actions.items()}


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
    """Microseconds of a call."""
    # Once for what is compiled at the first call.
    action()
    watch = Stopwatch(device, LAUNCHES)
    for _ in range(watch.rounds):
        action()
        watch.mark()
        for _ in range(watch.calls):
            action()
        watch.mark()
    return watch.us()
