"""Every CUDA source compiles for sm_90a without a spilled register, within the registers that its launches assume.

Needs no GPU. ptxas reports resources and goes on; a user's GPU would be the first to find out. Without nvcc the package
is built without these kernels, and that is what is looked at.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from torch_sparse_mla import LAYOUTS
from torch_sparse_mla._ops import registration

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "csrc").rglob("*.cu"))
NVCC = next(
    (path for path in ("/usr/local/cuda/bin/nvcc", shutil.which("nvcc")) if path and os.access(path, os.X_OK)), None
)
# Kernel -> registers that each thread may have at launch. The attention kernels share them out anew as they start.
REGISTERS = {
    "attend_kernel": 65_536 // 384 // 8 * 8,
    "attend_wide_kernel": 65_536 // 384 // 8 * 8,
    "merge_kernel": 128,
}
# Every layout with bfloat16 queries, the quantised ones with float16 queries too.
ATTENTION_KERNELS = sum(1 if layout.latent == "bf16" else 2 for layout in LAYOUTS.values())


def nvcc_flags() -> list[str]:
    """Those of the build, so that what is examined is what ships."""
    found: dict[str, list[str]] = {}
    text = (ROOT / "setup.py").read_text()
    exec(re.search(r"^NVCC_FLAGS = \[.*?^\]$", text, re.MULTILINE | re.DOTALL)[0], found)
    return found["NVCC_FLAGS"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_spills_and_no_more_registers_than_a_block_has(source, tmp_path):
    if NVCC is None:
        assert not registration.native_cuda_ops, "the library has CUDA kernels, but no nvcc is here to examine them"
        return
    command = [NVCC, *nvcc_flags(), "-Xptxas=-v", "-c", str(source), "-o", str(tmp_path / "object.o")]
    report = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert report.returncode == 0, report.stderr
    kernels = re.findall(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        report.stderr,
        re.DOTALL,
    )
    assert len(kernels) >= 2, report.stderr
    for name, *numbers in kernels:
        stack, stores, loads, registers = map(int, numbers)
        assert stack == stores == loads == 0, name
        limit = next(limit for kernel, limit in REGISTERS.items() if kernel in name)
        assert registers <= limit, name
    for form in ("attend_kernel", "attend_wide_kernel"):
        assert sum(form in name for name, *_ in kernels) == ATTENTION_KERNELS, form
    # setmaxnreg is dropped, with a warning, where a kernel's roles are not one branch.
    assert "warning" not in report.stderr.lower(), report.stderr
    # So ptxas says that it makes asynchronous matrix products wait for one another.
    assert "Potential Performance Loss" not in report.stderr, report.stderr


def test_there_are_sources_to_compile():
    assert SOURCES
