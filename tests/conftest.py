"""Fixtures and rules that all tests share."""

import os
import zlib

import hypothesis
import pytest
import torch

# A stream that waits for memory holds up its hardware queue, and ranks of one process share 8 of them where nobody asks
# for more. Read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

LONGEST = {"test_triton_interpreted", "test_triton_aot", "test_cuda_aot", "test_sparse_ckv_decode_sm90"}

# Derandomised: a failure on one machine is the same failure on another, and no example database is left behind.
hypothesis.settings.register_profile("package", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("package")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The only skips there are: a test marked `gpu` (or `multigpu`) on a machine without (enough) GPUs.

    Tests that are whole runs of a compiler or an interpreter come first: at the end, one process would wait for them.
    """
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        for marker, needed in (("gpu", 1), ("multigpu", 2)):
            if gpus < needed and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {gpus}"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """A CPU generator seeded by the test's name: the same values in every run, alone or in any order."""
    return torch.Generator().manual_seed(zlib.crc32(request.node.name.encode()))
