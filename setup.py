"""Builds the native library `torch_sparse_mla/_native.so`. Everything else about the package is in pyproject.toml.

The library is optional: without it the operators run as plain PyTorch on the CPU and as Triton kernels on the GPU. It
uses nothing of PyTorch but the stable ABI, and no symbol of Python, so one build serves every PyTorch from 2.11 on,
with or without CUDA, under every Python. Where nvcc is found it also holds the kernels for Hopper GPUs (sm_90a), with
a CUDA runtime of their own: it needs no CUDA library at run time but the driver's.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError as error:
    # Without build isolation pip does not look at build-system.requires, and new environments hold old releases.
    raise SystemExit(
        f"torch_sparse_mla: setuptools {setuptools.__version__} is too old to build the package; "
        "run \"pip install --upgrade 'setuptools>=77'\" first"
    ) from error

NATIVE = "torch_sparse_mla._native"
# The oldest stable ABI that the sources use: 2.10. Without it the headers choose the ABI of the PyTorch at hand, and
# the library would not load in an older one.
STABLE_ABI = "0x020a000000000000"
CUDA_SOURCES = sorted(str(source) for source in Path("csrc").rglob("*.cu"))
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    # Kernels are compiled side by side, on all cores.
    "-split-compile=0",
]


class BuildNative(build_ext):
    """Compile the native library, or say why not and go on."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        try:
            torch_dir = _torch_dir()
            ext.extra_compile_args += ["-isystem", str(torch_dir / "include")]
            ext.library_dirs.append(str(torch_dir / "lib"))
            self._add_cuda(ext)
            super().build_extension(ext)
        except Exception as error:
            # An older library would be taken for the one that these sources make.
            for folder in (Path(self.build_lib), Path()):
                (folder / self.get_ext_filename(NATIVE)).unlink(missing_ok=True)
            self._warn(error)

    def _add_cuda(self, ext: Extension) -> None:
        """Compile the CUDA sources and add them, or say why not and go on."""
        nvcc = _nvcc()
        if nvcc is None:
            print("torch_sparse_mla: no nvcc, so no sm_90a kernels: Triton serves every GPU.", flush=True)
            return
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        objects = [str(folder / f"{Path(source).stem}.cu.o") for source in CUDA_SOURCES]
        try:
            for source, target in zip(CUDA_SOURCES, objects, strict=True):
                subprocess.run([nvcc, *NVCC_FLAGS, "-c", source, "-o", target], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            lines = (
                "torch_sparse_mla: WARNING: the sm_90a kernels were not built.",
                f"  Reason: {error}",
                "  Triton serves every GPU without them. They need nvcc 12.4 or newer.",
            )
            print("\n".join(lines), file=sys.stderr, flush=True)
            return
        ext.extra_objects += objects
        ext.define_macros.append(("TORCH_SPARSE_MLA_SM90", "1"))
        toolkit = Path(nvcc).resolve().parents[1]
        ext.library_dirs += [str(folder) for folder in (toolkit / "lib64", toolkit / "lib") if folder.is_dir()]
        ext.libraries += ["cudart_static", "rt", "pthread"]

    def _warn(self, error: Exception) -> None:
        lines = (
            "torch_sparse_mla: WARNING: the native library was not built.",
            f"  Reason: {error}",
            "  The package installs and works without it; decoding on the CPU is several times slower.",
            "  To build it: install g++ 9 or newer and PyTorch, then run 'pip install --no-build-isolation .'",
        )
        print("\n".join(lines), file=sys.stderr, flush=True)


class PlatformWheel(bdist_wheel):
    """Tag the wheel for the platform alone: the library is loaded by path, not imported."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def _torch_dir() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("PyTorch is not installed where the build runs (pip isolates builds by default)")
    return Path(spec.origin).parent


def _nvcc() -> str | None:
    """That of CUDA_HOME where it is set; else the usual place's, or the one on PATH."""
    home = os.environ.get("CUDA_HOME")
    places = [Path(home if home is not None else "/usr/local/cuda", "bin", "nvcc")]
    if home is None and shutil.which("nvcc"):
        places.append(Path(shutil.which("nvcc")))
    return next((str(place) for place in places if os.access(place, os.X_OK)), None)


native = Extension(
    NATIVE,
    sources=sorted(str(source) for source in Path("csrc").rglob("*.cpp")),
    depends=CUDA_SOURCES + sorted(str(header) for header in Path("csrc").rglob("*.*h")),
    language="c++",
    optional=True,
    libraries=["torch_cpu", "dl"],
    define_macros=[("TORCH_TARGET_VERSION", STABLE_ABI)],
    # No -ffast-math: NaN and infinity have a meaning here. The two -fno flags only drop errno and exception flags.
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-g0",
        "-Wall",
        "-Wextra",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-ffp-contract=fast",
    ],
)

setup(ext_modules=[native], cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel})
