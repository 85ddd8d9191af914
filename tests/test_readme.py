"""The README's examples run as they stand, and its tables say what the results say."""

import re
import subprocess
import sys
from pathlib import Path

import torch

from torch_sparse_mla import SelectionPlan

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_operator_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    examples = [block for block in blocks if "transformers" not in block]
    assert len(examples) >= 2
    names: dict[str, object] = {}
    for example in examples:
        exec(example, names)
        # Rows beyond the engine's batch of five may be padding, and empty.
        assert torch.isfinite(names["out"].float()).all() and torch.isfinite(names["lse"][:4]).all()
    sizes, plan = names["plan_sizes"], names["plan"]
    assert isinstance(sizes, SelectionPlan)
    assert (sizes.counts(plan) > 2048).all()


def test_tables_say_what_the_results_say():
    command = [sys.executable, str(ROOT / "profiling" / "report.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
