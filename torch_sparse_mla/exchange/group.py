"""The ranks of a channel: a process group, or the loopback ranks of one process. Only this file and the transports
know which."""

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Group(Protocol):
    """What a channel asks of its ranks."""

    rank: int
    world: int
    described: str

    def transports(self, device_type: str) -> tuple[str, ...]:
        """Transports that are possible, the one that `auto` prefers first."""

    def device_type(self, asked: str | torch.device | None) -> str: ...

    def device(self, asked: str | torch.device | None) -> torch.device: ...

    def local_name(self, name: str) -> str:
        """The name that a channel has in this process."""

    def leave(self, name: str, why: str) -> None:
        """This rank takes no further part in a channel."""

    def agree(self, step: str, action: Callable[[], T], value: object = None) -> T:
        """Run a fallible step. Raises on every rank where one rank fails, or where `value` is not equal everywhere."""


class LoopbackGroup:
    """W ranks in one process, for tests, demos and one-GPU benchmarks.

    Args:
        world: number of ranks, 1 or more.
        device: "cpu" or a CUDA device, where caches and workspaces of all ranks are.
    Ranks: one thread makes a channel for each rank, one after another. For an exchange it calls `start` for every rank,
        then `wait` for every rank; a combined call needs a thread (or on a GPU a stream) for each rank.
    """

    def __init__(self, world: int, device: str | torch.device = "cpu") -> None:
        if not isinstance(world, int) or world < 1:
            raise ValueError(f"torch_sparse_mla.LoopbackGroup: world: got {world!r}; allowed: 1 or more")
        self.world = world
        self.device = _with_index(torch.device(device))
        self.boards: dict[str, Board] = {}

    def rank(self, rank: int) -> "LoopbackRank":
        """The group as rank `rank` sees it: what `Channel.create` takes."""
        if not 0 <= rank < self.world:
            raise ValueError(f"torch_sparse_mla.LoopbackGroup: rank: got {rank}; allowed: 0 to {self.world - 1}")
        return LoopbackRank(self, rank)


class Board:
    """What the loopback ranks of one channel share.

    Attributes:
        changed: guards everything here, and is notified of every change.
        values: what each rank that made its channel gave.
        failure: why no rank may go on, or None.
        threads: the thread that each rank was last seen on; not its number, which a later thread may get again.
        shared: whatever a transport keeps here.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: dict[int, object] = {}
        self.failure: str | None = None
        self.threads: dict[int, threading.Thread] = {}
        self.shared: dict[str, Any] = {}


class LoopbackRank:
    def __init__(self, group: LoopbackGroup, rank: int) -> None:
        self.group, self.rank, self.world = group, rank, group.world
        self.described = f"a loopback group of {group.world}"

    def transports(self, device_type: str) -> tuple[str, ...]:
        return ("loopback",)

    def device_type(self, asked: str | torch.device | None) -> str:
        return self.device(asked).type

    def device(self, asked: str | torch.device | None) -> torch.device:
        if asked is not None and _with_index(torch.device(asked)) != self.group.device:
            raise ValueError(
                f"torch_sparse_mla::Channel.create: argument 'device': got {asked}; allowed: {self.group.device}, "
                "the loopback group's"
            )
        return self.group.device

    def local_name(self, name: str) -> str:
        return f"{name}:{self.rank}"

    def board(self, name: str) -> Board:
        return self.group.boards.setdefault(name, Board())

    def leave(self, name: str, why: str) -> None:
        """End this rank's part: its peers fail from now on; once all left, the name is free again."""
        board = self.group.boards.get(name)
        if board is None:
            return
        with board.changed:
            board.failure = board.failure or why
            board.values.pop(self.rank, None)
            board.changed.notify_all()
        if not board.values:
            self.group.boards.pop(name, None)

    def agree(self, step: str, action: Callable[[], T], value: object = None) -> T:
        """Ranks come one after another, so an earlier rank learns of a failure at its next call."""
        if value is None:
            return action()
        result = action()
        board = self.board(value.name)
        with board.changed:
            if board.failure:
                raise RuntimeError(f"torch_sparse_mla channel '{value.name}': {board.failure}")
            for rank, other in board.values.items():
                if other != value:
                    board.failure = f"rank {self.rank} gave {value}, rank {rank} gave {other}"
                    board.changed.notify_all()
                    raise ValueError(f"torch_sparse_mla::Channel.create: {board.failure}; allowed: equal arguments")
            board.values[self.rank] = value
            board.threads[self.rank] = threading.current_thread()
        return result


class ProcessRank:
    """This process as a rank of a `torch.distributed` process group. Ranks keep the order of the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.backend = dist.get_backend(group)
        self.described = f"a {self.backend} group of {self.world}"

    def transports(self, device_type: str) -> tuple[str, ...]:
        if device_type == "cpu":
            return ("collective",)
        return ("direct", "collective") if "nccl" in self.backend else ("direct",)

    def device_type(self, asked: str | torch.device | None) -> str:
        if asked is not None:
            return torch.device(asked).type
        return "cuda" if "nccl" in self.backend else "cpu"

    def device(self, asked: str | torch.device | None) -> torch.device:
        return _with_index(torch.device(self.device_type(asked) if asked is None else asked))

    def local_name(self, name: str) -> str:
        return name

    def leave(self, name: str, why: str) -> None:
        """Peers find out by themselves: from a message that fails, or by the timeout."""

    def agree(self, step: str, action: Callable[[], T], value: object = None) -> T:
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        told: list[Any] = [None] * self.world
        mine = (None if failure is None else f"{type(failure).__name__}: {failure}", value)
        dist.all_gather_object(told, mine, group=self.group)
        if failure is not None:
            raise failure
        for rank, (message, _) in enumerate(told):
            if message is not None:
                raise RuntimeError(f"torch_sparse_mla::Channel.create: {step}: rank {rank} failed: {message}")
        for rank, (_, other) in enumerate(told):
            if other != told[0][1]:
                raise ValueError(
                    f"torch_sparse_mla::Channel.create: rank 0 gave {told[0][1]}, rank {rank} gave {other}; "
                    "allowed: equal arguments"
                )
        return result


def _with_index(device: torch.device) -> torch.device:
    """A CUDA device by number, as tensors name theirs."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def as_group(group: object) -> Group:
    """What `Channel.create` was given, as the ranks of a channel."""
    if isinstance(group, LoopbackRank):
        return group
    if isinstance(group, dist.ProcessGroup):
        return ProcessRank(group)
    raise ValueError(
        f"torch_sparse_mla::Channel.create: argument 'group': got {type(group).__name__}; allowed: a torch.distributed "
        "process group (dist.group.WORLD), or LoopbackGroup(world).rank(rank)"
    )
