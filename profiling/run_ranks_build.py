"""Compiles csrc where it stands, unless the native library is there and loads. Nothing is installed or fetched."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROBE = "import torch_sparse_mla._ops as o; print('native library', o.native_library or o.native_error)"


def main() -> int:
    if _loads():
        return 0
    code = subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT, check=False).returncode
    return code or (0 if _loads() else 1)


def _loads() -> bool:
    check = f"{PROBE}; raise SystemExit(0 if o.native_library else 1)"
    return subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
