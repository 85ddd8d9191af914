"""All that takes several GPUs of one host, in one run: tests of processes, benchmarks and the demo with a rank on each.

make bench-ranks N=2
python profiling/run_ranks.py --ranks 2 --device cpu --quick      # a trial of the run itself, without GPUs

Steps run one after another, each under a limit of its own; one that fails or takes too long is reported, and the others
run. Results lie in profiling/results; how each step went, in profiling/results/ranks. Exit status 1 if any step failed.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "profiling" / "results"
LIMIT_S = 470
# How long the ranks of a step may take to end when they are told to.
GRACE_S = 8
TAIL_LINES = 60
MULTIGPU = re.compile(r"^@pytest\.mark\.multigpu\n(?:@.*\n)*def (test_\w+)", re.MULTILINE)
DEMO = {
    "cuda": ["--layout", "fp8_ds_mla", "--context", "1024", "--tokens", "8", "--strategy", "all"],
    "cpu": [
        "--model",
        "glm_moe_dsa",
        "--layout",
        "fp8_ds_mla",
        "--context",
        "96",
        "--tokens",
        "3",
        "--strategy",
        "all",
    ],
}


@dataclasses.dataclass
class Step:
    """One command. `limit_s`: seconds after which it is stopped. `details`: what more there is to say once it ended."""

    name: str
    arguments: list[str]
    limit_s: float
    details: Callable[[], dict] = dict


@dataclasses.dataclass
class Outcome:
    name: str
    status: str
    seconds: float
    command: str
    details: dict = dataclasses.field(default_factory=dict)
    tail: list[str] = dataclasses.field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="processes, and GPUs of this host")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="few and small shapes")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"for all steps together (default: {LIMIT_S})")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="steps to run, by name (default: all)")
    parser.add_argument("--commit", help="commit to record (default: asked of git)")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="DIR", help="folder for the results")
    options = parser.parse_args(argv)
    if options.ranks < 1:
        parser.error(f"argument --ranks: got {options.ranks}; allowed: 1 or more")
    reason = _unfit(options)
    if reason is not None:
        parser.error(reason)
    steps = plan_steps(options)
    names = [step.name for step in steps]
    unknown = [name for name in options.only or () if name not in names]
    if unknown:
        parser.error(f"argument --only: got {', '.join(unknown)}; allowed: {', '.join(names)}")
    return run_steps([step for step in steps if not options.only or step.name in options.only], options)


def run_steps(steps: list[Step], options: argparse.Namespace) -> int:
    """Run every step, whatever became of those before it. Returns the exit status."""
    until = time.monotonic() + options.limit_s
    outcomes = []
    for step in steps:
        print(f"== {step.name}: {_shown(step.arguments)}", flush=True)
        outcomes.append(run_step(step, until - time.monotonic()))
        outcome = outcomes[-1]
        more = f"; {outcome.details}" if outcome.details else ""
        print(f"== {step.name}: {outcome.status} after {outcome.seconds:.0f} s{more}", flush=True)
    path = _write(outcomes, options)
    print(f"\n{'step':16} {'seconds':>7}  status")
    for outcome in outcomes:
        print(f"{outcome.name:16} {outcome.seconds:7.0f}  {outcome.status}")
    print(f"wrote {_shown([str(path)])}")
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


def run_step(step: Step, left_s: float) -> Outcome:
    """Run one command, its output shown as it comes. It never raises: what goes wrong is the outcome."""
    limit_s = min(step.limit_s, left_s)
    began = time.monotonic()
    command = _shown(step.arguments)
    if limit_s <= 0:
        return Outcome(step.name, "not run: no time was left", 0.0, command)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    try:
        process = subprocess.Popen(
            step.arguments,
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return Outcome(step.name, f"failed: {error}", 0.0, command)
    watch = _Watch(process, limit_s)
    lines = []
    for line in process.stdout:
        print(f"  {line.rstrip()}", flush=True)
        lines.append(_clean(line.rstrip()))
    code = process.wait()
    watch.end()
    status = "ok" if code == 0 else f"failed: exit status {code}"
    if watch.stopped:
        status = f"failed: stopped after its limit of {limit_s:.0f} s"
    try:
        details = step.details()
    except (OSError, ElementTree.ParseError) as error:
        details = {"unreadable": str(error)}
    tail = [] if status == "ok" else lines[-TAIL_LINES:]
    return Outcome(step.name, status, round(time.monotonic() - began, 1), command, details, tail)


class _Watch:
    """Stops a step at its limit: tells its processes to end, and after a grace ends those that have not."""

    def __init__(self, process: subprocess.Popen, limit_s: float) -> None:
        self.process, self.stopped = process, False
        # Kept: once a parent has ended, its children are nobody's.
        self.groups: list[int] = []
        self._timers = [
            threading.Timer(limit_s, self._stop, [signal.SIGTERM]),
            threading.Timer(limit_s + GRACE_S, self._stop, [signal.SIGKILL]),
        ]
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def end(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _stop(self, how: signal.Signals) -> None:
        self.stopped = True
        self.groups = list(dict.fromkeys([*self.groups, *_groups_of(self.process.pid)]))
        for group in self.groups:
            # It may have ended in the meantime.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, how)


def _groups_of(root: int) -> list[int]:
    """The process groups of a process and all its descendants: torchrun gives each rank one of its own."""
    rows = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        # One that ends meanwhile is none of those to stop.
        with contextlib.suppress(OSError):
            # After the name, in parentheses, which may hold anything: state, parent, process group.
            parent, group = entry.read_text().rpartition(")")[2].split()[1:3]
            rows.append((int(entry.parent.name), int(parent), int(group)))
    members, groups = {root}, [root]
    grown = True
    while grown:
        grown = False
        for pid, parent, group in rows:
            if parent in members and pid not in members:
                members.add(pid)
                groups.append(group)
                grown = True
    own = os.getpgrp()
    return [group for group in dict.fromkeys(groups) if group != own]


def plan_steps(options: argparse.Namespace) -> list[Step]:
    """What there is to run, in order: what tells most comes first, in case the time runs out."""
    folder = options.json.resolve()
    junit = folder / "ranks" / "tests.xml"
    junit.parent.mkdir(parents=True, exist_ok=True)
    junit.unlink(missing_ok=True)
    on = ["--device", options.device]
    commit = ["--commit", options.commit] if options.commit else []
    bench = [*on, *commit, "--json", str(folder), *(["--quick"] if options.quick else [])]
    small = ["--topk", "64"] if options.device == "cpu" else []
    exchange = [*bench, *small, *(["--rows", "4", "--widths", "656"] if options.device == "cpu" else [])]
    decode = [*bench, *small, *(["--rows", "4", "--heads", "2"] if options.device == "cpu" else [])]
    demo_json = folder / f"demo-{_slug(options)}-x{options.ranks}.json"
    demo = ["-m", "torch_sparse_mla", "demo", *DEMO[options.device], *on, "--json", str(demo_json)]
    return [
        Step("build", [sys.executable, "profiling/run_ranks_build.py"], 90),
        Step("tests", _test_command(options, junit), 190, lambda: _test_counts(junit)),
        Step("ce_exchange", _torchrun(options, ["profiling/bench_ce_exchange.py", *exchange, "--budget-s", "85"]), 115),
        Step("dcp_decode", _torchrun(options, ["profiling/bench_dcp_decode.py", *decode, "--budget-s", "60"]), 100),
        Step(
            "c4_prefill", _torchrun(options, ["profiling/bench_c4_prefill_gather.py", *bench, "--budget-s", "30"]), 60
        ),
        Step("demo", _torchrun(options, demo), 70),
    ]


def _torchrun(options: argparse.Namespace, arguments: list[str]) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    return [sys.executable, *launcher, *arguments]


def _test_command(options: argparse.Namespace, junit: Path) -> list[str]:
    """Tests of several processes or GPUs: files named so, and in others what is marked `multigpu`."""
    chosen = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        name = str(path.relative_to(ROOT))
        if "processes" in path.name:
            chosen.append(name)
        else:
            chosen += [f"{name}::{test}" for test in MULTIGPU.findall(path.read_text())]
    marker = "gpu or multigpu" if options.device == "cuda" else "not gpu and not multigpu"
    # Ranks of several tests at once share the GPUs; more than two tests would wait for one another.
    workers = ["-n", "2", "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfEs",
        "-m",
        marker,
        *workers,
        "--timeout=130",
        f"--junit-xml={junit}",
        *sorted(chosen),
    ]


def _test_counts(junit: Path) -> dict:
    """How many tests passed, failed and were skipped, and which did not pass. The file holds no result: it goes."""
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
    junit.unlink()
    counts = {
        key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    }
    failed = []
    for suite in suites:
        for case in suite.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"{case.get('classname')}.{case.get('name')}")
    counts["passed"] = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    return {**counts, "not_passed": failed} if failed else counts


def _unfit(options: argparse.Namespace) -> str | None:
    if options.device == "cpu":
        return None
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < options.ranks:
        return f"argument --ranks: got {options.ranks}; allowed: 1 to {count}, the GPUs that PyTorch sees here"
    return None


def _slug(options: argparse.Namespace) -> str:
    if options.device == "cpu":
        return "cpu"
    import torch

    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")


def _write(outcomes: list[Outcome], options: argparse.Namespace) -> Path:
    path = options.json.resolve() / "ranks" / f"steps-{_slug(options)}-x{options.ranks}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"ranks": options.ranks, "device": options.device, "steps": [vars(outcome) for outcome in outcomes]}
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def _shown(arguments: list[str]) -> str:
    return _clean(" ".join(arguments).replace(sys.executable, "python"))


def _clean(text: str) -> str:
    """Without the folders of this machine."""
    for folder, name in ((str(ROOT), "."), (sys.prefix, "<prefix>"), (sys.base_prefix, "<prefix>")):
        text = text.replace(folder, name)
    return text


if __name__ == "__main__":
    sys.exit(main())
