"""Fixtures of the decode tests."""

import pytest

from . import emulated_sm90


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """The sm_90 kernels on the CPU."""
    return emulated_sm90.build(tmp_path_factory.mktemp("emulator"))
