"""Loopback ranks on threads of their own, as combined calls need."""

import threading
import time
from collections.abc import Callable

from .cases import World

DEADLINE_S = 30


def on_threads(world: World, function: Callable, slow: int | None = None, delay_s: float = 0.0) -> None:
    """Call `function(rank case, channel)` for every rank, each on its thread, rank `slow` later than the others."""
    failures = []

    def run(rank, channel):
        if rank.rank == slow:
            time.sleep(delay_s)
        try:
            function(rank, channel)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in world.both()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a rank hangs"
    if failures:
        raise failures[0]
