"""Every Triton kernel that ships compiles for every target, fits its shared memory and spills no register.

Needs no GPU: Triton cross-compiles and its own ptxas reports. A kernel that asks for too much shared memory, or spills,
compiles without complaint, so a user's GPU would be the first to find out.

On two cores all of it takes longer than the rest of the tests. So each target gets a fifth, which together are every
configuration; `TORCH_SPARSE_MLA_TEST_AOT=all` compiles everything for each target.
"""

import multiprocessing
import os
import re
import subprocess
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import get_ptxas

import torch_sparse_mla
from torch_sparse_mla.triton_launch import AotConfiguration

from .compiled_triton import compiled

PACKAGE = Path(torch_sparse_mla.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("triton_kernels*.py")
)
# Compute capability -> shared memory that one block may use, in bytes.
SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
WORKERS = 2


def configurations(module: str, capability: int) -> list[AotConfiguration]:
    return list(import_module(module).aot_configurations(capability))


def compile_configuration(configuration: AotConfiguration, capability: int) -> tuple[int, str]:
    """Returns bytes of shared memory, and what ptxas says about registers and spills."""
    kernel = compiled(configuration, capability)
    return kernel.metadata.shared, ptxas_report(kernel.asm["ptx"], capability)


def ptxas_report(ptx: str, capability: int) -> str:
    architecture = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}", "-o", "/dev/null", "/dev/stdin"]
    return subprocess.run(command, input=ptx, text=True, capture_output=True, check=True).stderr


def problem(shared: int, report: str, capability: int) -> str | None:
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    if not spills:
        return f"ptxas reported no spill counts: {report}"
    if any(stores != "0" or loads != "0" for stores, loads in spills):
        return f"spills: {spills[0][0]} bytes stored, {spills[0][1]} loaded"
    if shared > SHARED_BYTES[capability]:
        return f"shared memory: {shared} bytes of {SHARED_BYTES[capability]}"
    return None


def failure(capability: int, case: tuple[str, int]) -> str | None:
    """Compile one configuration in a worker process: None, or what is wrong with it."""
    module, index = case
    configuration = configurations(module, capability)[index]
    try:
        wrong = problem(*compile_configuration(configuration, capability), capability)
    except Exception as error:
        wrong = f"does not compile: {type(error).__name__}: {error}"
    return wrong and f"{module}: {configuration.name} on sm_{capability}: {wrong}"


@pytest.fixture(scope="module")
def workers():
    """Processes that import this module, and the package, from where this process has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PACKAGE.parent))
        patch.syspath_prepend(str(Path(__file__).parents[1]))
        with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
            yield pool


@pytest.mark.parametrize("capability", SHARED_BYTES, ids=lambda capability: f"sm_{capability}")
def test_every_configuration_compiles_and_fits(workers, capability):
    cases = [(module, index) for module in MODULES for index in range(len(configurations(module, capability)))]
    if os.environ.get("TORCH_SPARSE_MLA_TEST_AOT") != "all":
        cases = cases[list(SHARED_BYTES).index(capability) :: len(SHARED_BYTES)]
    assert cases
    failures = [text for text in workers.map(partial(failure, capability), cases, chunksize=4) if text]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_has_a_configuration(module):
    kernels = {
        name
        for name, value in vars(import_module(module)).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel") and value.__module__ == module
    }
    assert kernels
    assert kernels == {configuration.kernel.__name__ for configuration in configurations(module, 90)}
    names = [configuration.name for configuration in configurations(module, 90)]
    assert len(names) == len(set(names))


@triton.jit
def _hungry_kernel(data_ptr, COUNT: tl.constexpr):
    values = tl.load(data_ptr + tl.arange(0, COUNT))
    tl.store(data_ptr + tl.arange(0, COUNT), values / tl.sum(values))


def test_the_gate_sees_spills():
    options = {"num_warps": 1, "maxnreg": 32}
    hungry = AotConfiguration("hungry", _hungry_kernel, {"data_ptr": "*fp32:16"}, {"COUNT": 2048}, options)
    shared, report = compile_configuration(hungry, 90)
    assert problem(shared, report, 90).startswith("spills: ")


def test_the_gate_sees_shared_memory():
    report = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    assert problem(101_376, report, 120) is None
    assert problem(101_377, report, 120) == "shared memory: 101377 bytes of 101376"
    assert problem(0, "", 120).startswith("ptxas reported no spill counts")
