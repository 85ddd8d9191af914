"""`doctor`: versions, devices, the kernel behind every operator, a self-test, and what is missing with its remedy."""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

from .. import LAYOUTS, __version__, explain, sparse_ckv_decode, write_ckv_records
from .._ops import OPS, native_cuda_ops, native_error, native_library
from ..decode import reference
from ..decode.contract import sparse_ckv_decode_workspace_bytes
from . import plan
from .console import print_table

MIN_TORCH = (2, 11)
OPTIONAL_PACKAGES = {
    "triton": "the CUDA kernels; run 'pip install triton'",
    "transformers": "the demo and the model integration; run 'pip install \"transformers>=5.17\"'",
    "rich": "tables and progress of the demo; run 'pip install rich'",
    "matplotlib": "pictures; run 'pip install matplotlib'",
}
SELF_TEST_TOLERANCE = 1e-2


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("doctor", help="what runs on this machine, and what is missing", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the report to FILE")
    parser.add_argument(
        "--plan",
        metavar="KEY=VALUE",
        nargs="*",
        type=plan.setting,
        help="instead, the bytes that prefill gathers need: "
        + " ".join(f"{key}={value}" for key, value in plan.DEFAULTS.items()),
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report. Returns 1 if something that is installed does not work, 2 for a plan that cannot be, else 0."""
    if options.plan is not None:
        return _plan(options)
    report = examine()
    _print_report(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["broken"] else 0


def _plan(options: argparse.Namespace) -> int:
    try:
        report = plan.plan(options.plan)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    plan.print_plan(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def examine() -> dict:
    """The report as plain data. "missing" lists what could be added; "broken" what is there and does not work."""
    report = {
        "torch_sparse_mla": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: _package_version(name) for name in OPTIONAL_PACKAGES},
        "nvcc": _nvcc_version(),
        "cuda": _cuda(),
        "native_library": {"path": native_library, "reason": native_error},
        "ops": {op: {device: _kernel(op, device) for device in ("cpu", "cuda")} for op in OPS},
    }
    report["self_test"] = {device: _self_test(device) for device in ("cpu", *_cuda_names(report["cuda"]))}
    report["missing"] = _missing(report)
    report["broken"] = _broken(report)
    return report


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _nvcc_version() -> str | None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release ([\d.]+)", text)
    return release.group(1) if release else "unknown release"


def _cuda() -> dict:
    count = torch.cuda.device_count()
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "runtime": torch.version.cuda,
        "devices": [
            {"name": d.name, "capability": f"{d.major}.{d.minor}", "memory_gib": round(d.total_memory / 2**30, 1)}
            for d in devices
        ],
        "peer_access": [
            [source == peer or torch.cuda.can_device_access_peer(source, peer) for peer in range(count)]
            for source in range(count)
        ],
    }


def _cuda_names(cuda: dict) -> list[str]:
    return [f"cuda:{index}" for index in range(len(cuda["devices"]))]


def _kernel(op: str, device: str) -> dict[str, str]:
    explained = explain(op, device)
    return {"kernel": explained["kernel"], "why": explained["why"]}


def _self_test(device: str) -> str:
    """Decode a few rows on `device` and compare with the reference on the same records: "passed" or what is wrong."""
    generator = torch.Generator().manual_seed(0)
    layout, rows, heads, topk = "fp8_ds_mla", 2, 16, 48
    latent, rope = (torch.randn(64, width, generator=generator).bfloat16() for width in (512, 64))
    q = torch.randn(rows, heads, LAYOUTS[layout].query_dim, generator=generator).bfloat16()
    indices = torch.randint(-1, 64, (rows, topk), generator=generator, dtype=torch.int32)
    cache = torch.zeros(4, 16, LAYOUTS[layout].record_bytes, dtype=torch.uint8, device=device)
    try:
        write_ckv_records(latent.to(device), rope.to(device), torch.arange(64, device=device), cache, layout)
        out, lse = sparse_ckv_decode(q.to(device), cache, indices.to(device), softmax_scale=0.1, layout=layout)
        out, lse = out.float().cpu(), lse.cpu()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    expected_out, expected_lse = torch.empty(rows, heads, 512), torch.empty(rows, heads)
    workspace = torch.empty(sparse_ckv_decode_workspace_bytes(rows, heads, topk), dtype=torch.uint8)
    reference.sparse_ckv_decode(
        q.float(), cache.cpu(), indices, None, None, expected_out, expected_lse, workspace, 0.1, layout
    )
    error = float(torch.linalg.norm(out - expected_out) / torch.linalg.norm(expected_out))
    lse_error = float((lse - expected_lse).abs().max())
    if error <= SELF_TEST_TOLERANCE and lse_error <= SELF_TEST_TOLERANCE:
        return "passed"
    return f"wrong result: relative error {error:.1e} of out, {lse_error:.1e} of lse; allowed {SELF_TEST_TOLERANCE:.0e}"


def _missing(report: dict) -> list[str]:
    missing = [f"{name}: {OPTIONAL_PACKAGES[name]}" for name, version in report["packages"].items() if version is None]
    if native_library is None:
        missing.append(f"native library: {native_error}")
    elif not native_cuda_ops:
        missing.append(
            "sm_90a kernels: the native library was built without nvcc, so Hopper GPUs run the Triton kernels; "
            "run 'pip install --no-build-isolation .' where nvcc is installed"
        )
    if not report["cuda"]["devices"]:
        build = f"PyTorch {torch.__version__} is a CPU build" if torch.version.cuda is None else "no driver or no GPU"
        missing.append(f"CUDA device: {build}; everything runs on the CPU")
    return missing


def _broken(report: dict) -> list[str]:
    broken = [
        f"self-test on {device}: {result}" for device, result in report["self_test"].items() if result != "passed"
    ]
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if release < MIN_TORCH:
        broken.append(f"PyTorch {torch.__version__} is too old: run 'pip install \"torch>=2.11\"'")
    if native_library is None and "does not load" in native_error:
        broken.append(f"native library: {native_error}; build it again: 'pip install --no-build-isolation .'")
    for op, devices in report["ops"].items():
        if report["cuda"]["devices"] and devices["cuda"]["kernel"] == "none":
            broken.append(f"{op} has no CUDA kernel: {devices['cuda']['why']}")
    return broken


def _print_report(report: dict) -> None:
    versions = [
        ("torch_sparse_mla", report["torch_sparse_mla"]),
        ("Python", report["python"]),
        ("torch", report["torch"]),
    ]
    versions += [(name, version or "missing") for name, version in report["packages"].items()]
    versions.append(("CUDA of torch", report["cuda"]["runtime"] or "none (CPU build)"))
    versions.append(("nvcc", report["nvcc"] or "missing"))
    native = report["native_library"]
    versions.append(("native library", native["path"] or f"not in use: {native['reason']}"))
    print_table("Versions", ("what", "version"), versions)
    cuda = report["cuda"]
    if cuda["devices"]:
        rows = [
            (name, device["name"], device["capability"], f"{device['memory_gib']} GiB")
            for name, device in zip(_cuda_names(cuda), cuda["devices"], strict=True)
        ]
        print_table("CUDA devices", ("device", "name", "capability", ">memory"), rows)
    if len(cuda["devices"]) > 1:
        names = _cuda_names(cuda)
        rows = [
            (name, *("yes" if access else "no" for access in accesses))
            for name, accesses in zip(names, cuda["peer_access"], strict=True)
        ]
        print_table("Peer access (row reads column)", ("device", *names), rows)
    kernels = [
        (op, device, kernel["kernel"], kernel["why"])
        for op, devices in report["ops"].items()
        for device, kernel in devices.items()
    ]
    print_table("Operators", ("operator", "device", "kernel", "why"), kernels)
    print_table("Self-test", ("device", "sparse_ckv_decode against its reference"), list(report["self_test"].items()))
    for heading, lines in (("Missing", report["missing"]), ("Broken", report["broken"])):
        print(f"\n{heading}: " + ("nothing" if not lines else ""))
        for line in lines:
            print(f"  {line}")
