"""Fixtures of the decode tests."""

import ctypes

import pytest

from torch_sparse_mla import LAYOUTS
from torch_sparse_mla._ops import native_library

from . import emulated_sm90


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """The sm_90 kernels on the CPU."""
    return emulated_sm90.build(tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def sm90_plan():
    """The form that the sm_90 kernels make a call in, and the parts of a row; `form`: what is asked for."""
    function = ctypes.CDLL(native_library).torch_sparse_mla_sm90_plan
    function.argtypes = (*[ctypes.c_int64] * 3, ctypes.c_int, ctypes.c_bool, ctypes.c_int, ctypes.c_void_p)
    function.restype = ctypes.c_int64

    def plan(rows, heads, topk, layout="fp8_ds_mla", invariant=False, form=emulated_sm90.BY_MODEL):
        wide = ctypes.c_bool()
        parts = function(rows, heads, topk, list(LAYOUTS).index(layout), invariant, form, ctypes.byref(wide))
        return (emulated_sm90.WIDE if wide.value else emulated_sm90.NARROW), parts

    return plan
