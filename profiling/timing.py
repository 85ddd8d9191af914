"""Timing: contenders of one shape, interleaved in one process, on data that is not in the cache.

Each contender runs a rotation of index sets, so that every call finds its records in memory. On CUDA the whole rotation
is one captured graph and a sample is one replay divided by the number of sets; on the CPU a sample is one call.
Every contender is sampled in two rounds; of the two medians the lower one counts, with its own round's extremes.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

WARM_UP_SECONDS = 1.5
SETTLE_SECONDS = 0.02
ROUNDS = 2
CUDA_SAMPLES = 15
CPU_SAMPLES = (5, 50)
CPU_ROUND_SECONDS = 0.25
HOST_CALLS = 200
MIN_SETS = 8
ONE_ROW_SETS = 64
MAX_SETS = 512
# The records of one rotation are at least this many times the last-level cache.
CACHE_FACTOR = 2
COPY_BYTES = {"cuda": 2 << 30, "cpu": 128 << 20}
POISON_BYTE = 0xA5


@dataclass(frozen=True)
class Contender:
    """One implementation, bound to the inputs of one shape.

    Attributes:
        name: the `impl` of its cases.
        call: runs index set i; under capture on CUDA, so it may not synchronise.
        poison: overwrites what the last call wrote.
        error: distance of the last call's result from the oracle, on index set num_sets - 1.
        tolerance: the largest error that counts as correct.
        details: further fields of its cases.
    """

    name: str
    call: Callable[[int], None]
    poison: Callable[[], None]
    error: Callable[[], float]
    tolerance: float
    details: dict | None = None


@dataclass(frozen=True)
class Timing:
    """Microseconds for one call, and the error of the result that was checked after timing."""

    us: float
    us_min: float
    us_max: float
    error: float


def num_index_sets(rows: int, bytes_per_set: int, cache_bytes: int) -> int:
    """Sets in a rotation: 64 at one row, never fewer than 8, and twice the last-level cache where 512 sets can be that.

    A call so small that they cannot is all latency.
    """
    outgrown = -(-CACHE_FACTOR * cache_bytes // max(bytes_per_set, 1))
    return max(MIN_SETS, ONE_ROW_SETS // max(rows, 1), min(outgrown, MAX_SETS))


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache of a GPU; 0 for the CPU, whose benchmark measures arithmetic."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def time_contenders(contenders: list[Contender], num_sets: int, device: torch.device) -> dict[str, Timing | str]:
    """Time contenders in turns and check each result.

    Returns: for each contender's name a Timing, or the reason why there is none (it raised, or its result is wrong).
    """
    samplers, outcomes, rounds = {}, {}, {}
    make = _cuda_sampler if device.type == "cuda" else _cpu_sampler
    for contender in contenders:
        try:
            samplers[contender.name] = make(contender, num_sets)
        except Exception as error:
            # One contender that cannot run a shape must not cost the others their measurement.
            outcomes[contender.name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for _ in range(ROUNDS):
        for name, (sample, _) in samplers.items():
            rounds.setdefault(name, []).append(sample())
    for contender in contenders:
        if contender.name in samplers:
            outcomes[contender.name] = _checked(contender, samplers[contender.name][1], rounds[contender.name])
    return {contender.name: outcomes[contender.name] for contender in contenders}


def summarise(rounds: list[list[float]]) -> tuple[float, float, float]:
    """Median, least and greatest of the round with the lower median."""
    best = min(rounds, key=statistics.median)
    return statistics.median(best), min(best), max(best)


def poison(tensor: torch.Tensor) -> None:
    """NaN for floating point, a fixed byte for raw bytes."""
    tensor.fill_(torch.nan if tensor.is_floating_point() else POISON_BYTE)


def host_call_us(call: Callable[[int], None], device: torch.device) -> tuple[float, float, float]:
    """What one eager call costs the host: on CUDA without waiting for the device. Median, least, greatest."""
    rounds = []
    for _ in range(ROUNDS):
        samples = []
        for position in range(HOST_CALLS):
            begin = time.perf_counter()
            call(0)
            samples.append((time.perf_counter() - begin) * 1e6)
            if device.type == "cuda" and position % 50 == 49:
                torch.cuda.synchronize()
        rounds.append(samples)
    return summarise(rounds)


def warm_up(device: torch.device, seconds: float = WARM_UP_SECONDS) -> None:
    """Raise a GPU's clocks with matrix products on random data; once for each process."""
    if device.type != "cuda":
        return
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            torch.mm(a, a)
        torch.cuda.synchronize()


def copy_tb_per_s(device: torch.device) -> float:
    """Bandwidth of a large copy on the device, bytes read plus bytes written, in TB/s."""
    size = COPY_BYTES[device.type]
    source = torch.empty(size // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    target.copy_(source)
    samples = []
    for _ in range(10):
        samples.append(_elapsed_us(lambda: target.copy_(source), device))
    return 2 * size / statistics.median(samples) * 1e-6


def _checked(contender: Contender, final: Callable[[], None], rounds: list[list[float]]) -> Timing | str:
    contender.poison()
    final()
    error = contender.error()
    # A comparison with NaN is false: a NaN error fails here.
    if not error <= contender.tolerance:
        return f"wrong result: error {error:.2e}, allowed {contender.tolerance:.0e}"
    return Timing(*summarise(rounds), error)


def captured_rotation(contender: Contender, num_sets: int) -> Callable[[], None]:
    """Capture one rotation of a contender's calls. Returns a function that replays it."""
    # Compilation, module loading and one-time set-up happen here, before capture, on the stream that captures.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index_set in range(min(num_sets, 3)):
            contender.call(index_set)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index_set in range(num_sets):
            contender.call(index_set)
    return graph.replay


def _cuda_sampler(contender: Contender, num_sets: int) -> tuple[Callable[[], list[float]], Callable[[], None]]:
    """Returns a function that samples one rotation and one that runs it once and waits."""
    replay = captured_rotation(contender, num_sets)

    def sample() -> list[float]:
        until = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < until:
            replay()
            torch.cuda.synchronize()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CUDA_SAMPLES)]
        # One replay ahead keeps the device busy while the host enqueues the first sample.
        replay()
        for begin, end in events:
            begin.record()
            replay()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 / num_sets for begin, end in events]

    def final() -> None:
        replay()
        torch.cuda.synchronize()

    return sample, final


def _cpu_sampler(contender: Contender, num_sets: int) -> tuple[Callable[[], list[float]], Callable[[], None]]:
    contender.call(0)

    def sample() -> list[float]:
        samples, least, most = [], *CPU_SAMPLES
        until = time.perf_counter() + CPU_ROUND_SECONDS
        while len(samples) < least or (time.perf_counter() < until and len(samples) < most):
            index_set = len(samples) % num_sets
            begin = time.perf_counter()
            contender.call(index_set)
            samples.append((time.perf_counter() - begin) * 1e6)
        return samples

    return sample, lambda: contender.call(num_sets - 1)


def _elapsed_us(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3
