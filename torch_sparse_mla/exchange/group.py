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
        """Transports that are possible, the one that `auto` takes first."""

    def device(self, asked: str | torch.device | None) -> torch.device: ...

    def local_name(self, name: str) -> str:
        """The name that a channel has in this process."""

    def sharing(self, name: str, device: torch.device) -> int:
        """How many ranks of a channel, this one among them, have this rank's GPU. Collective."""

    def leave(self, name: str, why: str) -> None:
        """This rank takes no further part in a channel."""

    def agree(self, name: str, step: str, action: Callable[[], T], *, equal: bool = False) -> T:
        """Run a fallible step in the making of channel `name`. Raises on every rank where one rank fails or is at
        another step, or, with `equal`, where the results are not equal. Steps do not nest."""


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
        self.device = _device(device, "LoopbackGroup")
        self.boards: dict[str, Board] = {}

    def rank(self, rank: int) -> "LoopbackRank":
        """The group as rank `rank` sees it: what `Channel.create` takes."""
        if not isinstance(rank, int) or not 0 <= rank < self.world:
            raise ValueError(f"torch_sparse_mla.LoopbackGroup: rank: got {rank!r}; allowed: 0 to {self.world - 1}")
        return LoopbackRank(self, rank)


class Board:
    """What the loopback ranks of one channel share.

    Attributes:
        changed: guards everything here, and is notified of every change.
        values: what each rank that made its channel gave.
        failure: why no rank may go on, or None.
        threads: the thread that each rank last started on; not its number, which a later thread may get again.
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
        return ("loopback", "direct", "ce") if device_type == "cuda" else ("loopback",)

    def device(self, asked: str | torch.device | None) -> torch.device:
        if asked is not None and _device(asked) != self.group.device:
            raise ValueError(
                f"torch_sparse_mla::Channel.create: argument 'device': got {asked}; allowed: {self.group.device}, "
                "the loopback group's"
            )
        return self.group.device

    def local_name(self, name: str) -> str:
        return f"{name}:{self.rank}"

    def sharing(self, name: str, device: torch.device) -> int:
        return self.world

    def board(self, name: str) -> Board:
        return self.group.boards.setdefault(name, Board())

    def leave(self, name: str, why: str) -> None:
        """End this rank's part: its peers fail from now on; once all left, the name is free again."""
        board = self.group.boards.get(name) if isinstance(name, str) else None
        if board is None:
            return
        with board.changed:
            board.failure = board.failure or why
            board.values.pop(self.rank, None)
            board.changed.notify_all()
        if not board.values:
            self.group.boards.pop(name, None)

    def agree(self, name: str, step: str, action: Callable[[], T], *, equal: bool = False) -> T:
        """Ranks come one after another, so an earlier rank learns of a failure at its next call."""
        board = self.board(name) if isinstance(name, str) else Board()
        # A second channel of the same name and rank is refused, and takes nothing from the first.
        again = equal and self.rank in board.values
        try:
            if board.failure:
                raise RuntimeError(f"torch_sparse_mla channel '{name}': {board.failure}")
            result = action()
            if equal and not again:
                self._join(board, result)
        except BaseException as error:
            if not again:
                self.leave(name, f"rank {self.rank} could not make its channel: {step}: {error}")
            raise
        return result

    def _join(self, board: Board, value: object) -> None:
        with board.changed:
            for rank, other in board.values.items():
                if other != value:
                    raise ValueError(
                        f"torch_sparse_mla::Channel.create: rank {self.rank} gave {value}, rank {rank} gave {other}; "
                        "allowed: equal arguments"
                    )
            board.values[self.rank] = value


class ProcessRank:
    """This process as a rank of a `torch.distributed` process group. Ranks keep the order of the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.backend = dist.get_backend(group)
        self.described = f"a {self.backend} group of {self.world}"

    def transports(self, device_type: str) -> tuple[str, ...]:
        return ("collective",) if device_type == "cpu" else ("direct", "ce", "collective")

    def device(self, asked: str | torch.device | None) -> torch.device:
        if asked is None:
            asked = "cuda" if "nccl" in self.backend else "cpu"
        return _device(asked)

    def local_name(self, name: str) -> str:
        return name

    def sharing(self, name: str, device: torch.device) -> int:
        own, told = self._tell("device", lambda: str(torch.cuda.get_device_properties(device).uuid), True)
        return told.count(own)

    def leave(self, name: str, why: str) -> None:
        """Peers find out by themselves: from a message that fails, or by the timeout."""

    def agree(self, name: str, step: str, action: Callable[[], T], *, equal: bool = False) -> T:
        result, told = self._tell(step, action, equal)
        for rank, value in enumerate(told):
            if value != told[0]:
                raise ValueError(
                    f"torch_sparse_mla::Channel.create: rank 0 gave {told[0]}, rank {rank} gave {value}; "
                    "allowed: equal arguments"
                )
        return result

    def word_of_first(self, step: str, action: Callable[[], T]) -> T:
        """What the action gave on rank 0."""
        return self._tell(step, action, True)[1][0]

    def _tell(self, step: str, action: Callable[[], T], share: bool) -> tuple[T, list[Any]]:
        """Run the action. Returns its result, and with `share` the results of all ranks."""
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        told: list[Any] = [None] * self.world
        dist.all_gather_object(told, (step, message, result if share else None), group=self.group)
        if failure is not None:
            raise failure
        for rank, (other, message, _) in enumerate(told):
            if message is not None:
                raise RuntimeError(f"torch_sparse_mla::Channel.create: {other}: rank {rank} failed: {message}")
        for rank, (other, _, _) in enumerate(told):
            if other != told[0][0]:
                raise RuntimeError(
                    f"torch_sparse_mla::Channel.create: rank 0 is at step '{told[0][0]}', rank {rank} at step '{other}'"
                )
        return result, [value for _, _, value in told]


def _device(asked: object, op: str = "Channel.create") -> torch.device:
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        given, cause = repr(asked), error
    else:
        if device.type in ("cpu", "cuda"):
            return _with_index(device)
        given, cause = str(device), None
    raise ValueError(
        f"torch_sparse_mla::{op}: argument 'device': got {given}; allowed: None, cpu or cuda, with a number"
    ) from cause


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
