"""Moves of sizes that are known beforehand: every rank's rows to every rank, and to each rank its partial results.

Where ranks can write one another's memory, and between processes on the CPU, a move is an exchange whose plan never
changes, into the channel's workspaces in turn, which peers write. Processes on GPUs that map nothing use the
collectives of their group (NCCL). Buffers are made once.
"""

import itertools
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ..decode.contract import compute_dtype
from ..exchange.api import ce_exchange_start, ce_exchange_wait
from ..exchange.channel import REUSE_DISTANCE, Channel
from ..records.layouts import LATENT_DIM
from .rank import Rank, Result
from .steps import Steps

ALIGNMENT_BYTES = 16


def open_channel(name: str, rank: Rank, capacity_records: int, record_bytes: int, scatter: bool = False) -> Channel:
    """A channel of one layer for a move that everything waits for: never by copy engines, which start late."""
    options = dict(rank.channel_options)
    if options["transport"] == "ce":
        options["transport"] = "direct"
    sizes = {"layers": 1, "scatter": scatter, "workspace_sets": REUSE_DISTANCE}
    return Channel.create(name, rank.group, capacity_records, record_bytes, **sizes, **options)


def workspaces_in_turn(channel: Channel | None, size: tuple[int, int], device: torch.device) -> Iterator[torch.Tensor]:
    """Where each move puts what arrives; where messages are sent, one buffer."""
    if channel is None:
        return itertools.repeat(torch.empty(size, dtype=torch.uint8, device=device))
    return itertools.cycle([workspace for (workspace,) in channel.workspaces])


def fixed_plan(channel: Channel, count: int, slots: torch.Tensor) -> torch.Tensor:
    """Rank r owns records r * count and up of one request; `slots` are this rank's."""
    plan = torch.zeros(channel.plan_words, dtype=torch.int32, device="cpu")
    for name, values in (
        ("owner_offsets", torch.arange(channel.world + 1, device="cpu") * count),
        ("owned_slots", slots),
        ("counts", torch.tensor([channel.world * count], device="cpu")),
    ):
        offset = channel.plan_sections[name].offset
        plan[offset : offset + len(values)] = values
    return plan.to(channel.device)


class Gather:
    """An all-gather.

    Attributes:
        channel: the channel; None where messages are sent.
        gathered: uint8 [world * records, record_bytes], in turn; a gather's rows, in order of rank.
    """

    def __init__(self, name: str, rank: Rank, records: int, record_bytes: int, device: torch.device) -> None:
        self.rank = rank
        total = rank.world * records
        self.channel = None if rank.sends_messages else open_channel(name, rank, total, record_bytes)
        self.gathered = workspaces_in_turn(self.channel, (total, record_bytes), device)
        self._plans: dict[int, torch.Tensor] = {}

    @property
    def transport(self) -> str:
        return "collective" if self.channel is None else self.channel.transport_name

    def run(self, rows: torch.Tensor) -> Steps[torch.Tensor]:
        """Gather rows [records or fewer, ...] of any type, contiguous, as many from every rank.

        Returns: [world, *rows.shape], valid until the next call.
        """
        count, world = len(rows), self.rank.world
        flat = rows.view(count, -1).view(torch.uint8)
        gathered = next(self.gathered)
        arrived = gathered[: world * count]
        if self.channel is None:
            dist.all_gather_into_tensor(arrived, flat, group=self.rank.group)
            yield
        else:
            call = ([flat.unsqueeze(0)], self._plan(count), [gathered], self.channel.state, self.channel)
            ce_exchange_start(*call)
            yield
            ce_exchange_wait(*call)
        return arrived.view(rows.dtype).view(world, *rows.shape)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()

    def _plan(self, count: int) -> torch.Tensor:
        if count not in self._plans:
            self._plans[count] = fixed_plan(self.channel, count, torch.arange(count, device="cpu"))
        return self._plans[count]


class Partials:
    """Partial results of all heads to the ranks whose heads they are, each exactly once.

    One record width divides the output and the log-sum-exp of a row, so that both travel in one exchange, from where
    attention writes them to where the merge reads them. A rank's part ends at a multiple of 16 bytes.

        outgoing: [rank 0's outputs | rank 1's | ...] [rank 0's lse | rank 1's | ...]
        arrived:  [outputs, lse of rank 0] [outputs, lse of rank 1] ...
    """

    def __init__(self, name: str, rank: Rank, device: torch.device) -> None:
        sizes, self.rank = rank.sizes, rank
        self.lse_dtype = compute_dtype(rank.dtype)
        self.out_row = sizes.heads * LATENT_DIM * rank.dtype.itemsize
        self.lse_row = sizes.heads * self.lse_dtype.itemsize
        self.record_bytes = math.gcd(self.out_row // sizes.heads, self.lse_row)
        self.outgoing = torch.empty(
            rank.world * sizes.rows * (self.out_row + self.lse_row), dtype=torch.uint8, device=device
        )
        self.lse_begin = rank.world * sizes.rows * self.out_row
        capacity = rank.world * self._records(sizes.rows)
        self.channel = None
        if rank.sends_messages:
            self.packed = torch.empty(capacity * self.record_bytes, dtype=torch.uint8, device=device)
        else:
            self.channel = open_channel(name, rank, capacity, self.record_bytes, scatter=True)
        self.arrived = workspaces_in_turn(self.channel, (capacity, self.record_bytes), device)
        self._plans: dict[int, torch.Tensor] = {}

    def buffers(self, rows: int) -> Result:
        """Where attention writes (out [world * rows, heads, 512], lse [world * rows, heads])."""
        total, heads = self.rank.world * rows, self.rank.sizes.heads
        out = self.outgoing[: total * self.out_row].view(self.rank.dtype).view(total, heads, LATENT_DIM)
        lse = self.outgoing[self.lse_begin :][: total * self.lse_row].view(self.lse_dtype).view(total, heads)
        return out, lse

    def run(self, rows: int) -> Steps[Result]:
        """Send what is in the buffers. Returns: (out [world, rows, heads, 512], lse [world, rows, heads]), arrived."""
        arrived = next(self.arrived)
        used = arrived.view(-1)[: self.rank.world * self._records(rows) * self.record_bytes]
        if self.channel is None:
            packed = self.packed[: used.numel()]
            for part, values in zip(self._views(packed, rows), self.buffers(rows), strict=True):
                part.copy_(values.view(part.shape))
            dist.all_to_all_single(used, packed, group=self.rank.group)
            yield
        else:
            cache = self.outgoing.view(1, -1, self.record_bytes)
            call = ([cache], self._plan(rows), [arrived], self.channel.state, self.channel)
            ce_exchange_start(*call)
            yield
            ce_exchange_wait(*call)
        return self._views(used, rows)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()

    def _records(self, rows: int) -> int:
        """Records of one rank's part."""
        size = rows * (self.out_row + self.lse_row)
        return -(-size // max(ALIGNMENT_BYTES, self.record_bytes)) * max(ALIGNMENT_BYTES // self.record_bytes, 1)

    def _views(self, buffer: torch.Tensor, rows: int) -> Result:
        """Outputs and log-sum-exps of every rank's part."""
        parts, heads = buffer.view(self.rank.world, -1), self.rank.sizes.heads
        out_bytes, lse_bytes = rows * self.out_row, rows * self.lse_row
        out = parts[:, :out_bytes].view(self.rank.dtype).unflatten(1, (rows, heads, LATENT_DIM))
        lse = parts[:, out_bytes : out_bytes + lse_bytes].view(self.lse_dtype).unflatten(1, (rows, heads))
        return out, lse

    def _plan(self, rows: int) -> torch.Tensor:
        if rows not in self._plans:
            outputs, lses = rows * self.out_row // self.record_bytes, rows * self.lse_row // self.record_bytes
            count, lse_begin = self._records(rows), self.lse_begin // self.record_bytes
            slots = torch.zeros(self.rank.world, count, dtype=torch.long, device="cpu")
            receivers = torch.arange(self.rank.world, device="cpu").unsqueeze(1)
            slots[:, :outputs] = receivers * outputs + torch.arange(outputs, device="cpu")
            slots[:, outputs : outputs + lses] = lse_begin + receivers * lses + torch.arange(lses, device="cpu")
            self._plans[rows] = fixed_plan(self.channel, count, slots.flatten())
        return self._plans[rows]
