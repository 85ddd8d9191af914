"""Results files: what a benchmark measured, on what, when. `report.py` reads nothing else."""

import json
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS_FOLDER = ROOT / "profiling" / "results"
DEMO = "demo"
MODES = ("graph", "call", "host")
_TEXT = ("bench", "device", "device_name", "torch", "triton", "cuda", "commit", "date")
_NUMBERS = ("us", "us_min", "us_max", "bytes", "flops")
_DEMO_NUMBERS = ("world", "context", "max_logit_diff", "ms_per_token", "record_bytes_per_token")
_DEMO_OPTIONAL = ("reference_ms_per_token", "speedup", "reference_bytes_per_token")
_DEMO_TEXT = ("model", "layout", "device", "mode", "strategy")


def document(bench: str, device: torch.device, copy_tb_per_s: float, commit: str | None, peers: dict) -> dict:
    """A results document without cases. `peers` says of each peer "ran" or why it did not."""
    return {
        "bench": bench,
        "device": device_slug(device),
        "device_name": device_name(device),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "cuda": torch.version.cuda or "none",
        "commit": commit or _git_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "copy_tb_per_s": copy_tb_per_s,
        "peers": peers,
        "cases": [],
    }


def make_case(
    fields: dict, impl: str, mode: str, us: tuple, num_bytes: int, flops: int, floor_us: float | None, **more: object
) -> dict:
    """One measurement. `us` is (median, least, greatest).

    Modes: "graph" replay on CUDA; "call" on the CPU, start to end; "host", what a call costs the host alone.
    """
    median, least, greatest = (round(value, 3) for value in us)
    measured = {"us": median, "us_min": least, "us_max": greatest, "bytes": num_bytes, "flops": flops}
    floor = None if floor_us is None else float(f"{floor_us:.4g}")
    return {**fields, "impl": impl, "mode": mode, **measured, "floor_us": floor, **more}


def write(document: dict, folder: Path = RESULTS_FOLDER) -> Path:
    """Validate a document and write it as `<bench>-<device>.json`."""
    path = Path(folder) / f"{document['bench']}-{document['device']}.json"
    validate(document, path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    # One case a line: a new run then shows in a diff as the cases that changed.
    head = {key: value for key, value in document.items() if key != "cases"}
    cases = ",\n".join("    " + json.dumps(case) for case in document["cases"])
    path.write_text(json.dumps(head, indent=2)[:-2] + f',\n  "cases": [\n{cases}\n  ]\n}}\n')
    return path


def load(folder: Path = RESULTS_FOLDER) -> list[dict]:
    """All documents of a folder, validated, in the order of their file names. A demo file gets "bench" and "device"."""
    documents = []
    for path in sorted(Path(folder).glob("*.json")):
        loaded = json.loads(path.read_text())
        if path.stem.startswith(f"{DEMO}-"):
            validate_demo(loaded, path.name)
            loaded = {**loaded, "bench": DEMO, "device": path.stem.removeprefix(f"{DEMO}-")}
        else:
            validate(loaded, path.name)
            if path.stem != f"{loaded['bench']}-{loaded['device']}":
                _reject(path.name, "bench, device", f"{loaded['bench']}, {loaded['device']}", "those of the file name")
        documents.append(loaded)
    return documents


def validate(document: dict, source: str) -> None:
    """Raise ValueError naming the file and the field for a document that is not a results file."""
    for key in _TEXT:
        if not isinstance(document.get(key), str) or not document[key]:
            _reject(source, key, document.get(key), "a text")
    if not _is_number(document.get("copy_tb_per_s")) or document["copy_tb_per_s"] <= 0:
        _reject(source, "copy_tb_per_s", document.get("copy_tb_per_s"), "a positive number")
    if not isinstance(document.get("peers"), dict):
        _reject(source, "peers", document.get("peers"), "an object: peer name to 'ran' or a reason")
    cases = document.get("cases")
    if not isinstance(cases, list) or not cases:
        _reject(source, "cases", cases, "a list with at least one case")
    for position, case in enumerate(cases):
        _validate_case(case, f"{source} case {position}")


def validate_demo(document: dict, source: str) -> None:
    runs = document.get("runs")
    if not isinstance(runs, list) or not runs:
        _reject(source, "runs", runs, "a list with at least one run")
    for position, run in enumerate(runs):
        where = f"{source} run {position}"
        for key in _DEMO_TEXT:
            if not isinstance(run.get(key), str):
                _reject(where, key, run.get(key), "a text")
        for key in _DEMO_NUMBERS:
            if not _is_number(run.get(key)):
                _reject(where, key, run.get(key), "a number")
        for key in _DEMO_OPTIONAL:
            if run.get(key) is not None and not _is_number(run[key]):
                _reject(where, key, run[key], "a number or null")
        if not isinstance(run.get("tokens_equal"), bool):
            _reject(where, "tokens_equal", run.get("tokens_equal"), "true or false")


def device_slug(device: torch.device) -> str:
    """ "nvidia-h200", "cpu-2-cores"."""
    if device.type == "cpu":
        return f"cpu-{torch.get_num_threads()}-cores"
    return re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def _validate_case(case: dict, where: str) -> None:
    if not isinstance(case.get("impl"), str):
        _reject(where, "impl", case.get("impl"), "a text")
    if case.get("mode") not in MODES:
        _reject(where, "mode", case.get("mode"), "one of " + ", ".join(MODES))
    for key in _NUMBERS:
        if not _is_number(case.get(key)) or case[key] < 0:
            _reject(where, key, case.get(key), "a number from 0 up")
    if not case["us_min"] <= case["us"] <= case["us_max"]:
        _reject(where, "us", case["us"], f"from us_min = {case['us_min']} to us_max = {case['us_max']}")
    if case.get("floor_us") is not None and not _is_number(case["floor_us"]):
        _reject(where, "floor_us", case["floor_us"], "a number or null")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _reject(source: str, field: str, given: object, allowed: str) -> None:
    raise ValueError(f"profiling.results: {source}: field '{field}': got {given!r}; allowed: {allowed}")


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


def _git_commit() -> str:
    """Short hash of HEAD, with "+" where tracked package files differ from it; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "-uno", "torch_sparse_mla", "csrc", "profiling/*.py")
        return head + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
