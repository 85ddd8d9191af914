"""CKV records: the bytes of one cached token, and the operators that write and read them in a paged cache.

takes: latent `[tokens, 512]`, RoPE part `[tokens, 64]`, slots. gives: a paged `uint8` cache, or the values read back.
Reading order: layouts (bytes) -> codec -> contract (what the operators accept) -> reference -> triton_kernels.
"""

from .codec import dequantise_records, quantise_records
from .layouts import LATENT_DIM, LAYOUTS, ROPE_DIM, RecordLayout

__all__ = ["LATENT_DIM", "LAYOUTS", "ROPE_DIM", "RecordLayout", "dequantise_records", "quantise_records"]
