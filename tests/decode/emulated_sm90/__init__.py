"""The sm_90 decode kernels on the CPU: their own sources, compiled by the C++ compiler beside an emulator.

Warps, matrix products, shared memory, barriers and late copies are carried out as on the GPU, so that the kernels can
be tested where there is neither nvcc nor a GPU. What it does not show: memory order, races between threads that happen
to run in a good order, and time.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from torch_sparse_mla import LAYOUTS

from ..cases import POISON_BYTE, DecodeCase

HERE = Path(__file__).parent
CSRC = Path(__file__).parents[3] / "csrc"
# Beyond the workspace.
GUARD, GUARD_BYTES = 0xA5, 4096
# Sm90Form of csrc/decode/workspace.h.
BY_MODEL, NARROW, WIDE = range(3)
FLOAT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class _RecordLayout(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("record_bytes", ctypes.c_int),
        ("query_dim", ctypes.c_int),
        ("latent", ctypes.c_uint8),
        ("group_size", ctypes.c_int),
        ("scale_offset", ctypes.c_int),
        ("token_scale_offset", ctypes.c_int),
        ("rope", ctypes.c_uint8),
        ("rope_offset", ctypes.c_int),
        ("rope_scale_offset", ctypes.c_int),
    )


class _Call(ctypes.Structure):
    """SparseCkvDecode of csrc/decode/sparse_ckv_decode.h."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("q_row_stride", ctypes.c_int64),
        ("q_type", ctypes.c_uint8),
        ("cache", ctypes.c_void_p),
        ("page_size", ctypes.c_int64),
        ("page_stride", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("layout", _RecordLayout),
        ("indices", ctypes.c_void_p),
        ("indices_row_stride", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("sink", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_type", ctypes.c_uint8),
        ("lse", ctypes.c_void_p),
        ("softmax_scale", ctypes.c_double),
        ("rows", ctypes.c_int64),
        ("heads", ctypes.c_int),
        ("topk", ctypes.c_int),
    )


class Emulator:
    """The kernels, compiled with the emulator in place of CUDA."""

    def __init__(self, library: Path):
        loaded = ctypes.CDLL(str(library))
        self.decode, self.mistake = loaded.emulate_sparse_ckv_decode, loaded.emulate_mistake
        self.decode.argtypes = (ctypes.POINTER(_Call), ctypes.c_int, ctypes.c_void_p, ctypes.c_bool, ctypes.c_int)
        self.mistake.argtypes = (ctypes.c_int,)
        self.decode.restype = self.mistake.restype = ctypes.c_char_p


def build(folder: Path) -> Emulator:
    tree = folder / "csrc"
    shutil.copytree(CSRC, tree)
    for path in HERE.iterdir():
        if path.suffix in (".h", ".cuh", ".cpp"):
            shutil.copy(path, tree / "decode" / path.name)
    library = folder / "emulator.so"
    sources = ["sparse_ckv_decode_sm90.cu", "emulator.cpp", "products.cpp", "mistakes.cpp"]
    command = ["c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-w", "-I.", "-o", library, "-x", "c++", *sources]
    subprocess.run(command, cwd=tree / "decode", check=True, timeout=250)
    return Emulator(library)


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def run(emulator: Emulator, case: DecodeCase, form: int = NARROW) -> tuple[torch.Tensor, torch.Tensor]:
    """Emulate the case on the CPU. Raises RuntimeError with what the emulator or the launcher has to say.

    `form`: the one that is asked for.
    """
    rows, heads, _ = case.q.shape
    size = case.workspace.numel()
    workspace = torch.full((size + GUARD_BYTES,), POISON_BYTE, dtype=torch.uint8)
    workspace[size:] = GUARD
    call = _Call(
        q=pointer(case.q),
        q_row_stride=case.q.stride(0),
        q_type=FLOAT_TYPES[case.q.dtype],
        cache=pointer(case.cache),
        page_size=case.cache.shape[1],
        page_stride=case.cache.stride(0),
        num_slots=case.cache.shape[0] * case.cache.shape[1],
        indices=pointer(case.indices),
        indices_row_stride=case.indices.stride(0),
        lengths=pointer(case.lengths),
        sink=pointer(case.sink),
        out=pointer(case.out),
        out_type=FLOAT_TYPES[case.out.dtype],
        lse=pointer(case.lse),
        softmax_scale=case.softmax_scale,
        rows=rows,
        heads=heads,
        topk=case.indices.shape[1],
    )
    layout = list(LAYOUTS).index(case.layout)
    error = emulator.decode(ctypes.byref(call), layout, workspace.data_ptr(), case.batch_invariant, form)
    if error:
        raise RuntimeError(error.decode())
    assert (workspace[size:] == GUARD).all(), "written beyond the workspace"
    return case.out, case.lse
