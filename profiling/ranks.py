"""The ranks of a benchmark of several: all of them in this process on one device, or this process as one of them.

Under torchrun each process is a rank with a GPU of its own (or the CPU). Every rank times its own stream, all begin a
sample together, and of each sample the slowest rank counts. What may fail is agreed upon: a contender that one rank
cannot run is dropped by all, or its peers would wait for it.
"""

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from torch_sparse_mla import LoopbackGroup

from . import timing
from .timing import Contender, Timing

GROUP_TIMEOUT_S = 90
SETTLE_REPLAYS = 3
SAMPLES = {"cuda": 15, "cpu": 10}
# Keeps the device busy while the host enqueues a sample.
AHEAD_CYCLES = 400_000
LINK_BYTES = 256 << 20


def make_ranks(device: torch.device, world: int) -> "LoopbackRanks | ProcessRanks":
    """This process's rank among those that torchrun started; else `world` ranks in this process."""
    if under_torchrun():
        return ProcessRanks(device)
    return LoopbackRanks(device, world)


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def process_device(device_type: str) -> torch.device:
    """The device of this process under torchrun: ranks of a host have GPUs in turn."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


class LoopbackRanks:
    """Every rank, in turns on one device: a time is that of all ranks together, and nobody waits.

    Attributes:
        own: the ranks that this process plays.
        leads: whether this process prints and writes.
        backend: of the process group; None without one.
        limits: what a reader must know of the times.
    """

    leads = True
    backend = None
    limits = (
        "All ranks run one after another on one stream of one device. So a time is that of all ranks together, peers' "
        "memory is local memory, and nobody waits. It says what packing, storing, flags and copying cost on the "
        "multiprocessors, and how much one bulk call saves over single ones; it says nothing about a link, about a "
        "copy engine (copies within a device run on multiprocessors) or about waiting."
    )

    def __init__(self, device: torch.device, world: int) -> None:
        self.device, self.world, self.own = device, world, list(range(world))
        self._group = LoopbackGroup(world, device)
        self.suffix = ""

    def group(self, rank: int) -> Any:
        """What `Channel.create` takes."""
        return self._group.rank(rank)

    def agree(self, failure: str | None) -> str | None:
        return failure

    def time(self, contenders: list[Contender], num_sets: int) -> dict[str, Timing | str]:
        return timing.time_contenders(contenders, num_sets, self.device)

    def quiet(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def close(self) -> None:
        """Nothing to end."""


class ProcessRanks:
    """This process as one rank. Attributes: as of `LoopbackRanks`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        shared = device.type == "cuda" and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"])
        self.backend = "nccl" if device.type == "cuda" and not shared else "gloo"
        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
        placed = {"device_id": device} if self.backend == "nccl" else {}
        dist.init_process_group(self.backend, timeout=timeout, **placed)
        # Messages between hosts' sides, which must not order anything on a device.
        self._hosts = dist.new_group(backend="gloo", timeout=timeout)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.own, self.leads = [self.rank], self.rank == 0
        self.suffix = f"-x{self.world}"
        where = f"one of {self.world} processes"
        self.limits = f"Each rank is {where} on one GPU, which they share: times are of time slices, not of a link."
        if not shared:
            kind = "GPU" if device.type == "cuda" else "CPU process"
            self.limits = f"Each rank is {where}, with a {kind} of its own; of each sample the slowest rank counts."
        self._token = torch.zeros(1, device=device)

    def group(self, rank: int) -> Any:
        return dist.group.WORLD

    def agree(self, failure: str | None) -> str | None:
        """The failure of the first rank that has one."""
        told: list[str | None] = [None] * self.world
        dist.all_gather_object(told, failure, group=self._hosts)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None), None)

    def mean(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self._hosts)
        return float(total) / self.world

    def time(self, contenders: list[Contender], num_sets: int) -> dict[str, Timing | str]:
        """As `timing.time_contenders`, by all ranks together."""
        outcomes: dict[str, Timing | str] = {}
        samplers = {}
        make = self._cuda_sampler if self.device.type == "cuda" else self._cpu_sampler
        for contender in contenders:
            sampler, failure = attempt(lambda contender=contender: make(contender, num_sets))
            failure = self.agree(failure)
            if failure is None:
                samplers[contender.name] = sampler
            else:
                outcomes[contender.name] = failure
        rounds: dict[str, list[list[float]]] = {}
        for _ in range(timing.ROUNDS):
            for name, (sample, _) in samplers.items():
                rounds.setdefault(name, []).append(self._slowest(sample()))
        for contender in contenders:
            if contender.name in samplers:
                outcomes[contender.name] = self._checked(contender, samplers[contender.name][1], rounds)
        return {contender.name: outcomes[contender.name] for contender in contenders}

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """What a rank prints that does not lead goes nowhere; errors go where they always go."""
        if self.leads:
            yield
            return
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield

    def close(self) -> None:
        sys.stdout.flush()
        dist.barrier(self._hosts)
        dist.destroy_process_group()

    def _checked(
        self, contender: Contender, final: Callable[[], None], rounds: dict[str, list[list[float]]]
    ) -> Timing | str:
        contender.poison()
        final()
        error, failure = attempt(contender.error)
        # A comparison with NaN is false: a NaN error fails here.
        if failure is None and not error <= contender.tolerance:
            failure = f"wrong result: error {error:.2e}, allowed {contender.tolerance:.0e}"
        failure = self.agree(failure)
        return Timing(*timing.summarise(rounds[contender.name]), error) if failure is None else failure

    def _slowest(self, samples: list[float]) -> list[float]:
        worst = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._hosts)
        return worst.tolist()

    def _begin_together(self) -> None:
        """On the streams where the ranks' GPUs have NCCL, else on the hosts."""
        if self.backend == "nccl":
            torch.cuda._sleep(AHEAD_CYCLES)
            dist.all_reduce(self._token)
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(self._hosts)

    def _cuda_sampler(self, contender: Contender, num_sets: int) -> tuple[Callable, Callable]:
        replay = timing.captured_rotation(contender, num_sets)

        def sample() -> list[float]:
            # As many replays on every rank: a graph may hold exchanges.
            for _ in range(SETTLE_REPLAYS):
                replay()
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(SAMPLES["cuda"])]
            for begin, end in events:
                self._begin_together()
                begin.record()
                replay()
                end.record()
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) * 1e3 / num_sets for begin, end in events]

        def final() -> None:
            replay()
            torch.cuda.synchronize()

        return sample, final

    def _cpu_sampler(self, contender: Contender, num_sets: int) -> tuple[Callable, Callable]:
        contender.call(0)

        def sample() -> list[float]:
            samples = []
            for number in range(SAMPLES["cpu"]):
                self._begin_together()
                begin = time.perf_counter()
                contender.call(number % num_sets)
                samples.append((time.perf_counter() - begin) * 1e6)
            return samples

        return sample, lambda: contender.call(num_sets - 1)


def attempt(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result, or why there is none. One contender that cannot run must not cost the others their measurement."""
    try:
        return action(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def link_tb_per_s(ranks: LoopbackRanks | ProcessRanks) -> float | None:
    """What a rank sends to the next one's memory while all do, in TB/s; None where memory of peers cannot be mapped."""
    if ranks.backend != "nccl" or ranks.world == 1:
        return None

    def measured() -> float:
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(LINK_BYTES, dtype=torch.uint8, device=ranks.device)
        handle = symmetric.rendezvous(own, dist.group.WORLD.group_name)
        target = handle.get_buffer((ranks.rank + 1) % ranks.world, (LINK_BYTES,), torch.uint8)
        source = torch.randint(256, (LINK_BYTES,), dtype=torch.uint8, device=ranks.device)
        target.copy_(source)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        dist.barrier()
        events[0].record()
        for _ in range(5):
            target.copy_(source)
        events[1].record()
        torch.cuda.synchronize()
        return 5 * LINK_BYTES / (events[0].elapsed_time(events[1]) * 1e-3) * 1e-12

    rate, failure = attempt(measured)
    failure = ranks.agree(failure)
    if failure is not None:
        print(f"link not measured: {failure}")
        return None
    return ranks.mean(rate)
