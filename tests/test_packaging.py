"""What `pip install` relies on: the metadata, and a build that survives a machine without a compiler."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import torch_sparse_mla

ROOT = Path(__file__).parents[1]


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    # No toolkit, unless a test brings one: none of these builds gets as far as to need its kernels.
    environment = {"CUDA_HOME": str(tree / "no-toolkit"), **environment}
    return subprocess.run(command, cwd=tree, env=os.environ | environment, capture_output=True, text=True, timeout=250)


def copy_of_the_build_files(tree: Path) -> Path:
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    (tree / "README.md").write_text("readme")
    (tree / "torch_sparse_mla").mkdir()
    (tree / "torch_sparse_mla" / "__init__.py").touch()
    return tree


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == torch_sparse_mla.__version__
    assert project["dependencies"] == ["torch>=2.11"]


def test_a_build_without_a_compiler_warns_and_succeeds(tmp_path):
    tree = copy_of_the_build_files(tmp_path)
    result = build(tree, CC="no-such-compiler", CXX="no-such-compiler")
    assert result.returncode == 0, result.stderr
    assert "WARNING: the native library was not built" in result.stderr
    assert "no-such-compiler" in result.stderr
    assert not list(tree.glob("torch_sparse_mla/*.so"))


def test_a_build_without_nvcc_says_so_and_goes_on(tmp_path):
    """The C++ compiler is missing too, so that the test takes no compilation: it is asked for after nvcc."""
    result = build(copy_of_the_build_files(tmp_path), CC="no-such-compiler", CXX="no-such-compiler")
    assert result.returncode == 0, result.stderr
    assert "no nvcc, so no sm_90a kernels: Triton serves every GPU" in result.stdout


def test_a_build_whose_nvcc_fails_says_so_and_goes_on(tmp_path):
    tree = copy_of_the_build_files(tmp_path)
    nvcc = tree / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\nexit 3\n")
    nvcc.chmod(0o755)
    home = str(tree / "toolkit")
    result = build(tree, CUDA_HOME=home, CC="no-such-compiler", CXX="no-such-compiler")
    assert result.returncode == 0, result.stderr
    assert "WARNING: the sm_90a kernels were not built" in result.stderr
    assert "returned non-zero exit status 3" in result.stderr


def test_a_build_without_pytorch_says_so(tmp_path):
    """As in pip's isolated build: the standard library and setuptools, no PyTorch."""
    tree = copy_of_the_build_files(tmp_path)
    isolated = (
        "import importlib.util, runpy, sys; found = importlib.util.find_spec; "
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else found(name, *rest); "
        "sys.argv = ['setup.py', 'build_ext', '--inplace']; runpy.run_path('setup.py', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", isolated], cwd=tree, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr
    assert "PyTorch is not installed where the build runs" in result.stderr
    assert "pip install --no-build-isolation" in result.stderr


def test_a_failed_build_leaves_no_older_library(tmp_path):
    tree = copy_of_the_build_files(tmp_path)
    (tree / "torch_sparse_mla" / "_native.so").write_bytes(b"of other sources")
    result = build(tree, CC="no-such-compiler", CXX="no-such-compiler")
    assert result.returncode == 0, result.stderr
    assert not list(tree.glob("torch_sparse_mla/*.so"))
