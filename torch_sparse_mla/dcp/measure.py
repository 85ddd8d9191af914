"""Measures, at warm-up, the figures that the cost model needs, and lets all ranks agree on them."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from .. import sharding
from ..decode.api import merge_partial_attention
from ..exchange.group import as_group
from ..records.layouts import LATENT_DIM
from ..selection.api import plan_selection
from ..selection.plan import SelectionPlan
from .costs import LinkCosts
from .gather import Gather
from .rank import Rank
from .steps import Steps, finish

PROBE_RECORDS = 512
PROBE_RECORD_BYTES = 1024
CALLS = 5
# A rank may still compile the kernels of an exchange while its peers wait.
COMPILE_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A full-size step over records of zeros; every page of the block table is page 0."""

    q: torch.Tensor
    cache: torch.Tensor
    topk: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor | None

    @staticmethod
    def make(rank: Rank, device: torch.device) -> "Inputs":
        sizes, layout = rank.sizes, rank.layout
        blocks = sharding.local_length(0, sizes.topk, rank.world, rank.interleave) // rank.page_size + 1
        positions = torch.arange(sizes.topk, dtype=torch.int32, device=device)
        # The CPU encodes no float64.
        states = torch.zeros(sizes.rows, layout.query_dim, dtype=torch.float32, device=device)
        return Inputs(
            q=torch.zeros(sizes.rows, sizes.heads, layout.query_dim, dtype=rank.dtype, device=device),
            cache=torch.zeros(1, rank.page_size, layout.record_bytes, dtype=torch.uint8, device=device),
            topk=positions.repeat(sizes.rows, 1),
            block_table=torch.zeros(sizes.requests, blocks, dtype=torch.int32, device=device),
            lengths=torch.full((sizes.rows,), sizes.topk, dtype=torch.int32, device=device),
            latent=states[:, :LATENT_DIM],
            rope=states[:, LATENT_DIM:] if layout.rope else None,
        )


def agreed_costs(name: str, rank: Rank, device: torch.device, given: LinkCosts | None) -> Steps[tuple[LinkCosts, str]]:
    """Given or measured costs, each figure the highest of all ranks, and the transport that there is. Collective."""
    # Also where costs are given: kernels that one rank compiles later than another would run into timeouts.
    figures = as_group(rank.group).agree(f"{name}.warm-up", "measure", lambda: _measure_device(rank, device))
    patient = rank.channel_options | {"timeout_s": max(rank.channel_options["timeout_s"], COMPILE_TIMEOUT_S)}
    probe = Gather(
        f"{name}.probe", dataclasses.replace(rank, channel_options=patient), PROBE_RECORDS, PROBE_RECORD_BYTES
    )
    try:
        link = yield from _measure_link(probe)
        costs = LinkCosts(*link, *figures) if given is None else given
        # Float64 words of one probe record.
        words = torch.zeros(1, PROBE_RECORD_BYTES // 8, dtype=torch.float64)
        own = torch.tensor(dataclasses.astuple(costs), dtype=torch.float64)
        words[0, : len(own)] = own
        told = yield from probe.run(words.to(device))
        agreed = LinkCosts(*told[:, 0, : len(own)].amax(0).tolist())
        # Ranks that share a thread: nobody leaves before everybody has read.
        yield
    finally:
        probe.close()
    return agreed, probe.channel.transport_name


def _measure_link(probe: Gather) -> Steps[tuple[float, float]]:
    """Time of an exchange of next to nothing, and of each further byte."""
    few = torch.zeros(1, PROBE_RECORD_BYTES, dtype=torch.uint8, device=probe.gathered.device)
    many = few.repeat(PROBE_RECORDS, 1)
    hop = yield from _time_gather(probe, few)
    full = yield from _time_gather(probe, many)
    received = (probe.channel.world - 1) * many.numel()
    return hop, max(full - hop, 0.0) / max(received, 1)


def _time_gather(probe: Gather, rows: torch.Tensor) -> Steps[float]:
    """Median of this rank's own part: not what other ranks do on this thread in between."""
    times = []
    for _ in range(CALLS):
        gather = probe.run(rows)
        began = _now(rows.device)
        next(gather)
        first_half = _now(rows.device) - began
        yield
        began = _now(rows.device)
        finish(gather)
        times.append(first_half + _now(rows.device) - began)
    return 1e6 * statistics.median(times[1:])


def _measure_device(rank: Rank, device: torch.device) -> tuple[float, ...]:
    """Attention in both forms, planning, and looking up slots."""
    inputs, sizes = Inputs.make(rank, device), rank.sizes
    records = torch.zeros(1, sizes.topk, sizes.record_bytes, dtype=torch.uint8, device=device)
    owners = sharding.owner(inputs.topk, rank.world, rank.interleave)
    own = torch.where(owners == 0, inputs.topk, -1).repeat(rank.world, 1)
    all_q = inputs.q.repeat(rank.world, 1, 1)
    selection = SelectionPlan(sizes.requests, sizes.rows_per_request, sizes.topk, rank.world)
    plan = selection.empty(device)
    geometry = {"page_size": rank.page_size, "interleave": rank.interleave, "rank": rank.rank}

    def attend_owner() -> None:
        out, lse = rank.attend(all_q, records, own)
        if rank.world > 1:
            merge_partial_attention(
                out.view(rank.world, sizes.rows, sizes.heads, LATENT_DIM), lse.view(rank.world, sizes.rows, sizes.heads)
            )

    def look_up() -> None:
        tokens = inputs.topk.view(sizes.requests, -1)
        sharding.local_slots(tokens, inputs.block_table, world=rank.world, **geometry)

    return tuple(
        _time(action, device)
        for action in (
            lambda: rank.attend(inputs.q, records, inputs.topk),
            attend_owner,
            lambda: plan_selection(inputs.topk, inputs.block_table, selection, plan=plan, **geometry),
            look_up,
        )
    )


def _time(action: Callable[[], object], device: torch.device) -> float:
    """Median microseconds of a call, after one that may have to compile."""
    times = []
    for _ in range(CALLS):
        began = _now(device)
        action()
        times.append(_now(device) - began)
    return 1e6 * statistics.median(times[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
