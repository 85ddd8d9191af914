"""Prepares .venv for `make`. Standard library only: it runs before anything is installed.

python3 tools/setup_env.py environment   # .venv with torch, triton and tools/requirements.txt
python3 tools/setup_env.py package       # compile csrc and install the package, editable
python3 tools/setup_env.py lint          # the formatters' pinned versions
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
TORCH = "torch==2.13.0"
TRITON = "triton==3.7.1"
HEARTBEAT_SECONDS = 20

# Run by a candidate interpreter: its torch and triton, and the triton release which that torch was built for.
PROBE = """
import importlib.metadata, json, re
import torch
try:
    from triton import __version__ as triton
except ImportError:
    triton = None
wanted = [r.split(";")[0].strip() for r in importlib.metadata.requires("torch") or [] if re.match(r"triton\\b", r)]
print(json.dumps({"torch": torch.__version__, "triton": triton, "triton_wanted": wanted[0] if wanted else None}))
"""


def run_step(title: str, command: list) -> None:
    """Run one command quietly; print its name, its time, and all that it said if it failed."""
    print(f"[setup] {title} ...", flush=True)
    started = time.monotonic()
    finished = threading.Event()

    def heartbeat() -> None:
        while not finished.wait(HEARTBEAT_SECONDS):
            print(f"[setup]   still running, {time.monotonic() - started:.0f} s", flush=True)

    threading.Thread(target=heartbeat, daemon=True).start()
    try:
        result = subprocess.run(
            [str(part) for part in command], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    finally:
        finished.set()
    if result.returncode:
        print(result.stdout, flush=True)
        raise SystemExit(f"[setup] {title} failed (exit code {result.returncode}); the output is above")
    print(f"[setup] {title}: {time.monotonic() - started:.1f} s", flush=True)


def pip_install(title: str, *arguments: object) -> None:
    run_step(title, [VENV_PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def probe_torch(python: object) -> dict | None:
    """What `python` can import, or None where it has no torch of MIN_TORCH or newer."""
    result = subprocess.run([str(python), "-c", PROBE], cwd=VENV.anchor, capture_output=True, text=True)
    if result.returncode:
        return None
    found = json.loads(result.stdout.splitlines()[-1])
    release = tuple(int(part) for part in re.findall(r"\d+", found["torch"])[:2])
    return found if release >= MIN_TORCH else None


def create_venv(system_site_packages: bool) -> None:
    options = ["--system-site-packages"] if system_site_packages else []
    run_step("virtual environment .venv", [sys.executable, "-m", "venv", "--clear", *options, VENV])


def prepare_environment() -> None:
    if sys.version_info[:2] < MIN_PYTHON:
        raise SystemExit(
            f"[setup] Python {sys.version.split()[0]} is too old; 3.11 or newer is needed: make PYTHON=python3.11"
        )
    found = probe_torch(VENV_PYTHON) if VENV_PYTHON.exists() else None
    if found is None:
        outside = probe_torch(sys.executable)
        create_venv(system_site_packages=outside is not None)
        # An interpreter that is itself a virtual environment does not pass its packages on to .venv.
        found = probe_torch(VENV_PYTHON) if outside else None
        if outside and found is None:
            create_venv(system_site_packages=False)
    if found is None:
        pip_install(f"{TORCH}, {TRITON}", TORCH, TRITON)
        found = probe_torch(VENV_PYTHON)
        if found is None:
            raise SystemExit(f"[setup] {TORCH} is installed, yet .venv/bin/python does not import it")
    elif found["triton"] is None:
        pip_install("triton", found["triton_wanted"] or TRITON)
        found = probe_torch(VENV_PYTHON)
    print(f"[setup] torch {found['torch']}, triton {found['triton']}", flush=True)
    install_requirements(found)


def install_requirements(found: dict) -> None:
    """Install the pins; pip may not replace the torch and the triton that are there."""
    keep = [f"{name}=={found[name].split('+')[0]}" for name in ("torch", "triton") if found[name]]
    constraints = VENV / "constraints.txt"
    constraints.write_text("\n".join(keep) + "\n")
    requirements = ROOT / "tools" / "requirements.txt"
    pip_install("requirements", "--requirement", requirements, "--constraint", constraints)


def install_package() -> None:
    # A library of other sources, or of another machine, must not be taken for the one that is built now.
    for stale in (ROOT / "torch_sparse_mla").glob("_native*.so"):
        stale.unlink()
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    pip_install("compile csrc, install torch_sparse_mla", "--no-build-isolation", "--editable", ROOT)
    report = "import torch_sparse_mla._ops as o; print('native library', o.native_library or o.native_error)"
    subprocess.run([VENV_PYTHON, "-c", "print(end='[setup] ');" + report], cwd=VENV.anchor, check=True)
    if shutil.which("c++") and not list((ROOT / "torch_sparse_mla").glob("_native*.so")):
        raise SystemExit(
            "[setup] csrc did not compile, though there is a C++ compiler; "
            f"'{VENV_PYTHON} setup.py build_ext --inplace' shows why"
        )


def install_lint() -> None:
    pip_install("formatters", "--requirement", ROOT / "tools" / "requirements-lint.txt")


if __name__ == "__main__":
    steps = {"environment": prepare_environment, "package": install_package, "lint": install_lint}
    if len(sys.argv) != 2 or sys.argv[1] not in steps:
        raise SystemExit(f"usage: python3 tools/setup_env.py {{{','.join(steps)}}}")
    os.chdir(ROOT)
    steps[sys.argv[1]]()
