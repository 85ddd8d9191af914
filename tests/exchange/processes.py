"""Runs a function as several ranks, each a process of its own in a process group."""

import datetime
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 20
DEADLINE_S = 120


def run_ranks(
    world: int, function: Callable, folder: Path, *arguments: object, start: str = "fork", backend: str = "gloo"
) -> list[object]:
    """Call `function(rank, *arguments)` in `world` processes. Returns each rank's result; None for one that was killed.

    Raises: AssertionError with the traceback of a rank that failed, or where the deadline passes.
    """
    context = multiprocessing.get_context(start)
    queue, done = context.Queue(), context.Event()
    store = str(folder / "store")
    ranks = [
        context.Process(target=_enter, args=(rank, world, store, backend, queue, done, function, arguments))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    results, deadline = {}, time.monotonic() + DEADLINE_S
    try:
        while any(process.is_alive() for process in ranks) or not queue.empty():
            assert time.monotonic() < deadline, f"ranks {sorted(set(range(world)) - set(results))} hang"
            while not queue.empty():
                rank, result, failure = queue.get()
                assert failure is None, f"rank {rank}: {failure}"
                results[rank] = result
            if all(rank in results or not process.is_alive() for rank, process in enumerate(ranks)):
                done.set()
            time.sleep(0.01)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [results.get(rank) for rank in range(world)]


def in_turn(rank: int, jobs: list[tuple]) -> list[object]:
    """Call `function(rank, *arguments)` for every (function, *arguments), in the same ranks: to start them takes longer
    than most of what they do. Returns the results."""
    results = []
    for function, *arguments in jobs:
        # A rank that hangs is killed: what it began last is then in the captured output.
        print(f"rank {rank}: {function.__name__}{tuple(arguments)}", flush=True)
        try:
            results.append(function(rank, *arguments))
            dist.barrier()
        except Exception as error:
            raise RuntimeError(f"{function.__name__}{tuple(arguments)}") from error
    return results


def die() -> None:
    """End this rank at once, as a crash does."""
    os._exit(9)


def _enter(rank: int, world: int, store: str, backend: str, queue, done, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
        )
        queue.put((rank, function(rank, *arguments), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
    queue.close()
    queue.join_thread()
    # A rank that leaves early would be one more failure to its peers; and where a peer is gone, destroying the group
    # would wait for it.
    done.wait(DEADLINE_S)
    os._exit(0)
