"""What the benchmarks share: arguments, the table printed while they run, the results file."""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from torch_sparse_mla import explain

from . import results
from .ranks import LoopbackRanks, ProcessRanks, attempt, link_tb_per_s
from .shapes import (
    DecodeShape,
    ExchangeShape,
    GatherShape,
    PackShape,
    PlanShape,
    RecordShape,
    SelectShape,
    SplitSelectShape,
    StepShape,
)
from .timing import Contender, Timing, copy_tb_per_s, host_call_us, time_contenders, warm_up

Shape = (
    DecodeShape
    | RecordShape
    | PlanShape
    | ExchangeShape
    | PackShape
    | StepShape
    | GatherShape
    | SelectShape
    | SplitSelectShape
)
BY_COPY = "by copy"
NOT_MEASURED = "available, not measured"
# Fields that a line of the printed table names, with their values.
SIZES = ("rows", "context", "tokens", "records", "heads", "topk", "record_bytes", "layers", "world")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help=f"cuda or cpu (default here: {default})")
    parser.add_argument("--quick", action="store_true", help="a few shapes only")
    parser.add_argument(
        "--json", type=Path, default=results.RESULTS_FOLDER, metavar="DIR", help="folder for the results"
    )
    parser.add_argument("--budget-s", type=float, metavar="S", help="begin no further shape after so many seconds")
    parser.add_argument("--commit", help="commit to record (default: asked of git)")


def parse_device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        parser.error(f"argument --device: got {name!r}; allowed: cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: got 'cuda', but PyTorch sees no CUDA device here; allowed: cpu")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def op_impl(op: str, device: torch.device) -> str:
    """The `impl` name of what a call of `op` on `device` runs: triton, native-cpu, native-cuda or reference."""
    kernel = explain(op, device)["kernel"]
    return f"native-{device.type}" if kernel == "native C++" else kernel


class Session:
    """One process's measurements on one device: prints each as it comes, keeps them for one results file.

    `peers`: for each optional peer why it cannot run here, or None. One that fails is reported and the run goes on.
    `ranks`: where a case takes several ranks. All of them measure; the one that leads writes the file.
    """

    def __init__(
        self,
        bench: str,
        device: torch.device,
        commit: str | None,
        peers: dict[str, str | None],
        ranks: LoopbackRanks | ProcessRanks | None = None,
    ):
        self._begin = time.perf_counter()
        self.device, self._ranks = device, ranks
        self.failures: list[str] = []
        warm_up(device)
        self._peers = {name: reason or NOT_MEASURED for name, reason in peers.items()}
        self._document = results.document(bench, device, copy_tb_per_s(device), commit, self._peers)
        head = self._document
        if isinstance(ranks, ProcessRanks):
            head["device"] += ranks.suffix
            head["device_name"] = f"{ranks.world} x {head['device_name']}"
        versions = f"torch {head['torch']}, triton {head['triton']}, commit {head['commit']}"
        print(f"{bench} on {head['device_name']}, {versions}")
        print(
            f"copy {head['copy_tb_per_s']:.3f} TB/s (bytes read plus written); times in us: median [least .. greatest]"
        )
        for peer, state in self._peers.items():
            print(f"peer {peer}: {state}")

    @property
    def cases(self) -> list[dict]:
        return self._document["cases"]

    @property
    def _writes(self) -> bool:
        return self._ranks is None or self._ranks.leads

    @property
    def copy_tb_per_s(self) -> float:
        return self._document["copy_tb_per_s"]

    def within(self, budget_s: float | None, shapes: list[Shape], folder: Path) -> Iterator[Shape]:
        """Shapes, until the time is over: on every rank at the same one.

        After each the results so far are written, so that a run which is stopped has measured something.
        """
        for position, shape in enumerate(shapes):
            spent = time.perf_counter() - self._begin
            over = f"{spent:.0f} s" if budget_s is not None and spent > budget_s else None
            if self._ranks is not None:
                over = self._ranks.agree(over)
            if over is not None:
                left = [_describe(other.fields()) for other in shapes[position:]]
                print(f"left out after {over}: {len(left)} shapes: {'; '.join(left)}", flush=True)
                self.note("left_out", left)
                return
            yield shape
            if self.cases and self._writes:
                results.write(self._document, folder)

    def note(self, key: str, value: object) -> None:
        """A further figure of the whole run."""
        self._document[key] = value

    def note_ranks(self, ranks: LoopbackRanks | ProcessRanks) -> None:
        """What the ranks are, and what a reader must know of their times."""
        self.note("ranks", "processes" if isinstance(ranks, ProcessRanks) else "on one device")
        self.note("limits", ranks.limits)
        print(ranks.limits)

    def note_link(self, ranks: LoopbackRanks | ProcessRanks) -> float | None:
        """The rate of the ranks' link in TB/s, measured now; None where there is none to measure."""
        rate = link_tb_per_s(ranks)
        if rate is not None:
            self.note("link_tb_per_s", rate)
            print(f"link {rate * 1e3:.0f} GB/s (copy to the next rank's memory, all ranks at once)")
        return rate

    def made_by_all(
        self, shape: Shape, ranks: LoopbackRanks | ProcessRanks, makers: dict[str, Callable[[], Any]]
    ) -> list[Any]:
        """What makers give, such as one for each transport. What a rank cannot make is reported and left out by all."""
        found = []
        for name, make in makers.items():
            made, failure = attempt(make)
            failed = ranks.agree(failure)
            if failed is None:
                found.append(made)
                continue
            if failure is None:
                made.close()
            self.fail(f"{shape.fields()} {name}: {failed}")
        return found

    def measure(
        self,
        shape: Shape,
        contenders: list[Contender],
        num_sets: int,
        floor_us: float | str | None = BY_COPY,
        parts: int = 1,
    ) -> None:
        """Time the contenders of a shape. A peer that fails is reported; any other failure fails the run as well.

        Args:
            floor_us: None where there is none; BY_COPY: the shape's bytes at the copy's rate.
            parts: a call is so many of what is reported.
        """
        if floor_us == BY_COPY:
            floor_us = shape.bytes / self.copy_tb_per_s * 1e-6
        mode = "graph" if self.device.type == "cuda" else "call"
        details = {contender.name: contender.details or {} for contender in contenders}
        outcomes = self._time(contenders, num_sets)
        for impl, outcome in outcomes.items():
            if not isinstance(outcome, Timing):
                print(f"  {_describe(shape.fields())}  {impl}: {outcome}", flush=True)
                if impl not in self._peers:
                    self.failures.append(f"{_describe(shape.fields())} {impl}: {outcome}")
                elif self._peers[impl] == NOT_MEASURED:
                    self._peers[impl] = outcome
                continue
            if impl in self._peers:
                self._peers[impl] = "ran"
            us = tuple(value / parts for value in (outcome.us, outcome.us_min, outcome.us_max))
            more = {"error": float(f"{outcome.error:.3g}"), **details[impl]}
            self._add(results.make_case(shape.fields(), impl, mode, us, shape.bytes, shape.flops, floor_us, **more))

    def measure_host(self, shape: Shape, contender: Contender) -> None:
        """Time what one eager call costs the host."""
        contender.call(0)
        us = host_call_us(contender.call, self.device)
        self._add(results.make_case(shape.fields(), contender.name, "host", us, shape.bytes, shape.flops, None))

    def fail(self, what: str) -> None:
        """Something that should have been measured was not."""
        print(f"  {what}", flush=True)
        self.failures.append(what)

    def finish(self, folder: Path) -> int:
        """Write the results file, if there is anything to write. Returns the process's exit status."""
        if self.cases and self._writes:
            print(f"wrote {results.write(self._document, folder)}")
        print(f"{len(self.cases)} cases in {time.perf_counter() - self._begin:.0f} s")
        for failure in self.failures:
            print(f"FAILED {failure}")
        return 1 if self.failures or not self.cases else 0

    def _time(self, contenders: list[Contender], num_sets: int) -> dict[str, Timing | str]:
        if self._ranks is not None:
            return self._ranks.time(contenders, num_sets)
        return time_contenders(contenders, num_sets, self.device)

    def _add(self, case: dict) -> None:
        self.cases.append(case)
        floor = case["floor_us"]
        share = f"{floor / case['us']:7.1%} of floor" if floor else " " * 16
        print(
            f"  {_describe(case):56} {case['impl']:24} {case['mode']:5} {case['us']:10.2f} "
            f"[{case['us_min']:.2f} .. {case['us_max']:.2f}]  {case['bytes'] / 1e9:.4f} GB {share}",
            flush=True,
        )


def _describe(fields: dict) -> str:
    shape = [fields.get("layout"), fields.get("op"), fields.get("beside") and f"beside {fields['beside']}"]
    shape += [f"{fields[key]} {key}" for key in SIZES if key in fields]
    if fields.get("rows_per_request", 1) > 1:
        shape.append(f"({fields['rows_per_request']} rows a request)")
    return " ".join(part for part in shape if part)
