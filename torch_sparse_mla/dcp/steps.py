"""A call as a generator that yields wherever every rank must have come before any may go on.

A rank with a process, thread or stream of its own runs straight through. Ranks that share a thread take turns.
"""

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]


def finish(steps: Steps[T]) -> T:
    """Run one rank's call to its end. Returns what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def run_loopback(calls: Sequence[Steps[T]]) -> list[T]:
    """Run one call of every loopback rank, in turns, on the calling thread.

    Args:
        calls: one for each rank, in order of rank: `[rank.full_steps(...) for rank in ranks]`.
    Returns: what each call returns. Raises: what the first call to fail raises; the others are left where they are.
    """
    results: list[T | None] = [None] * len(calls)
    unfinished = dict(enumerate(calls))
    while unfinished:
        for rank, call in list(unfinished.items()):
            try:
                next(call)
            except StopIteration as end:
                results[rank] = end.value
                del unfinished[rank]
    return results
