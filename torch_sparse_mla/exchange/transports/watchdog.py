"""A thread that notices when a stream has waited too long, for waits that have no clock of their own.

A stream writes `WAITING_FOR_*` into pinned host memory before it waits, and 0 after it. Both are constants, as a CUDA
graph needs them; so a second word, which a kernel counts up with every exchange, tells one wait from the next. An
exchange that was started and is not waited for leaves no trace here.
"""

import threading
import time
from collections.abc import Callable

import torch

NOT_WAITING, WAITING_FOR_LEAVE, WAITING_FOR_MESSAGES = range(3)
# Looks in a timeout, and the bounds of the seconds between two.
LOOKS = 8
LEAST_S, MOST_S = 0.002, 0.25


class Looks:
    """What was seen, and since when."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.seen: tuple[int, int] | None = None
        self.since = 0.0

    def is_too_long(self, waiting: int, progress: int, now: float) -> bool:
        """Whether one wait was seen at every look for longer than the timeout. The next such answer takes as long."""
        standing = None if waiting == NOT_WAITING else (waiting, progress)
        if standing != self.seen:
            self.seen, self.since = standing, now
        if standing is None or now - self.since <= self.timeout_s:
            return False
        self.since = now
        return True


class Watchdog:
    """
    Args:
        waiting, progress: int32 [1], host memory that the device writes.
        timeout_s: how long one wait may stand.
        release: ends it; called on the thread of the watchdog, again for as long as a wait goes on to stand: the first
            may have come just as what it gave up arrived.
        prepare: called first on that thread.
    """

    def __init__(
        self,
        waiting: torch.Tensor,
        progress: torch.Tensor,
        timeout_s: float,
        release: Callable[[], None],
        prepare: Callable[[], None],
    ) -> None:
        self.words, self.looks, self.release, self.prepare = (waiting, progress), Looks(timeout_s), release, prepare
        self.interval_s = min(max(timeout_s / LOOKS, LEAST_S), MOST_S)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="torch_sparse_mla watchdog", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()

    def _run(self) -> None:
        self.prepare()
        while not self.ended.wait(self.interval_s):
            waiting, progress = (int(word) for word in self.words)
            if self.looks.is_too_long(waiting, progress, time.monotonic()):
                self.release()
