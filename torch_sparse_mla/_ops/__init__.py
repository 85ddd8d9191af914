"""The operator table and its registration: importing this package registers `torch.ops.torch_sparse_mla`."""

from .registration import explain, library, native_cuda_ops, native_error, native_library
from .table import NAMESPACE, OPS, SPLITTING_OPS, Op

__all__ = [
    "NAMESPACE",
    "OPS",
    "SPLITTING_OPS",
    "Op",
    "explain",
    "library",
    "native_cuda_ops",
    "native_error",
    "native_library",
]
