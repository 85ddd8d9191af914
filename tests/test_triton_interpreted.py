"""Runs every Triton kernel on the CPU in Triton's interpreter, against the reference.

The interpreter is chosen when Triton is imported, for a whole process, so each `tests/<family>/interpreted_triton*.py`
(plain pytest tests, under a name that is not collected by itself) runs in a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(str(path.relative_to(TESTS)) for path in TESTS.glob("*/interpreted_triton*.py"))


@pytest.mark.parametrize("file", FILES)
def test_kernels_in_the_interpreter(file):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path])}
    # A parent pytest's options and xdist worker must not leak into the child.
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", str(TESTS / file), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    child = subprocess.run(
        command,
        env=environment,
        cwd=TESTS.parent,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert child.returncode == 0, child.stdout
    summary = child.stdout.strip().splitlines()[-1]
    assert re.search(r"\b[1-9]\d* passed", summary), child.stdout
    assert "skipped" not in summary, child.stdout


def test_there_are_interpreted_files():
    families = {str(path.parent.name) for path in TESTS.parent.glob("torch_sparse_mla/*/triton_kernels*.py")}
    assert families
    assert families == {Path(file).parent.name for file in FILES}
