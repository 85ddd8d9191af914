"""Moves of sizes that are known beforehand: every rank's rows to every rank, and to each rank its own."""

import datetime

import torch
import torch.distributed as dist

from ..exchange.api import ce_exchange_start, ce_exchange_wait
from ..exchange.channel import Channel, ExchangeError
from .rank import Rank
from .steps import Steps


class Gather:
    """An all-gather: an exchange whose plan never changes, hence over whichever transport the channel has.

    Attributes:
        channel: the channel.
        gathered: uint8 [world * records, record_bytes]; the last gather's rows, in order of rank.
    """

    def __init__(self, name: str, rank: Rank, records: int, record_bytes: int) -> None:
        total = rank.world * records
        self.channel = Channel.create(name, rank.group, total, record_bytes, layers=1, **rank.channel_options)
        self.gathered = torch.empty(total, record_bytes, dtype=torch.uint8, device=self.channel.device)
        self._plans: dict[int, torch.Tensor] = {}

    def run(self, rows: torch.Tensor) -> Steps[torch.Tensor]:
        """Gather rows [records or fewer, ...] of any type, contiguous, as many from every rank.

        Returns: [world, *rows.shape], valid until the next call.
        """
        channel, count = self.channel, len(rows)
        cache = rows.view(count, -1).view(torch.uint8).unsqueeze(0)
        call = ([cache], self._plan(count), [self.gathered], channel.state, channel)
        ce_exchange_start(*call)
        yield
        ce_exchange_wait(*call)
        return self.gathered[: channel.world * count].view(rows.dtype).view(channel.world, *rows.shape)

    def close(self) -> None:
        self.channel.close()

    def _plan(self, count: int) -> torch.Tensor:
        """Rank r owns records r * count and up of one request."""
        if count not in self._plans:
            channel = self.channel
            plan = torch.zeros(channel.plan_words, dtype=torch.int32)
            for name, values in (
                ("owner_offsets", torch.arange(channel.world + 1) * count),
                ("owned_slots", torch.arange(count)),
                ("counts", torch.tensor([channel.world * count])),
            ):
                offset = channel.plan_sections[name].offset
                plan[offset : offset + len(values)] = values
            self._plans[count] = plan.to(channel.device)
        return self._plans[count]


class Scatter:
    """To each rank its own rows, from every rank.

    Where ranks are processes without peer memory, an all-to-all. Elsewhere a gather of everything, of which a rank
    takes its part: `world` times the bytes, in one hop of the same latency.
    """

    def __init__(self, name: str, rank: Rank, records: int, record_bytes: int, transport: str) -> None:
        self.rank = rank
        self.gather = None
        if copies_of_partials(transport, rank.world) > 1:
            self.gather = Gather(name, rank, rank.world * records, record_bytes)

    def run(self, rows: torch.Tensor) -> Steps[torch.Tensor]:
        """Rows [world * records, ...], contiguous, those for rank 0 first. Returns: [world, records, ...], arrived."""
        world, shape = self.rank.world, rows.shape[1:]
        if self.gather is not None:
            gathered = yield from self.gather.run(rows)
            return gathered.view(world, world, -1, *shape)[:, self.rank.rank]
        arrived = torch.empty_like(rows)
        timeout_s = self.rank.channel_options["timeout_s"]
        try:
            work = dist.all_to_all_single(arrived, rows, group=self.rank.group, async_op=True)
            yield
            # A wait with a timeout would hold up the host until a GPU is done.
            work.wait() if rows.is_cuda else work.wait(datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise ExchangeError(
                f"torch_sparse_mla::DcpSparseDecode: rank {self.rank.rank}: partial results did not arrive within "
                f"{timeout_s} s; start the same calls on every rank ({str(error).splitlines()[0]})"
            ) from error
        return arrived.view(world, -1, *shape)


def copies_of_partials(transport: str, world: int) -> int:
    """How many times the partial results that a rank needs arrive there."""
    return 1 if transport == "collective" else world
