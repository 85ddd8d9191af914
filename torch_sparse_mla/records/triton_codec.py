"""Decoding of record codes inside Triton kernels, exact."""

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(codes, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """e4m3 bytes to numbers. Without the instruction: the bits of a float32 with another bias, then a power of two."""
    if NATIVE:
        values = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        bits = codes.to(tl.int32)
        rebiased = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
        values = rebiased.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
        values = tl.where((bits & 0x7F) == 0x7F, float("nan"), values).to(DTYPE)
    return values


@triton.jit
def decode_e2m1(codes):
    """The low four bits of each byte, an e2m1 code, to float32."""
    bits = codes.to(tl.int32)
    rebiased = ((bits & 7) << 22) | ((bits & 8) << 28)
    return rebiased.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2 ** 126
