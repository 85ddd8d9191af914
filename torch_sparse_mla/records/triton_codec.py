"""Record codes inside Triton kernels: decoding, exact; encoding, to nearest with ties to even."""

import triton
import triton.language as tl

FP32_INF_BITS = tl.constexpr(0x7F800000)


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


@triton.jit
def round_to_bf16(values, SATURATE: tl.constexpr):
    """Bits of the nearest bf16, ties to even, as uint16; with SATURATE, a finite value stays finite."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    if SATURATE:
        rounded = tl.where(magnitude < FP32_INF_BITS, tl.minimum(rounded, 0x7F7F), rounded)
    rounded = tl.where(magnitude > FP32_INF_BITS, 0x7FC0, rounded)
    return (rounded | ((bits >> 16) & 0x8000)).to(tl.uint16)


@triton.jit
def encode_e4m3(values):
    """Nearest e4m3 code as uint8, ties to even, saturating at 448; 0x7F for NaN."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    code = _encode_magnitude(tl.minimum(magnitude, 0x43E00000), 3, 7)
    code = tl.where(magnitude > FP32_INF_BITS, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_e2m1(values):
    """Nearest e2m1 code as int32, ties to even, saturating at 6. There is no code for NaN."""
    bits = values.to(tl.int32, bitcast=True)
    return _encode_magnitude(tl.minimum(bits & 0x7FFFFFFF, 0x40C00000), 1, 1) | ((bits >> 28) & 8)


@triton.jit
def _encode_magnitude(magnitude, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr):
    """Nearest minifloat code, ties to even, of the bits of a finite fp32 magnitude within the minifloat's range."""
    shift: tl.constexpr = 23 - MANTISSA_BITS
    normal = ((magnitude + (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1)) >> shift) - (
        (127 - BIAS) << MANTISSA_BITS
    )
    # Below the least normal number codes are evenly spaced. Added to a number whose last bit is worth that spacing, a
    # magnitude is rounded to it by the fp32 adder, and the code appears in the sum's low bits.
    anchor: tl.constexpr = (127 + shift + 1 - BIAS) << 23
    anchor_value = tl.full(magnitude.shape, anchor, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + anchor_value).to(tl.int32, bitcast=True) - anchor
    return tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
