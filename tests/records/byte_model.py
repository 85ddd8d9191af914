"""The record format a second time, from its description alone: byte by byte, with struct and numpy.

Shares no code with the package. Numbers become codes by a search through all codes.
"""

import struct

import numpy as np

RECORD_BYTES = {
    "bf16_mla": 1152,
    "bf16_mla_nope": 1024,
    "fp8_ds_mla": 656,
    "fp8_mla_nope": 528,
    "nvfp4_ds_mla": 432,
    "nvfp4_ds_mla_fp8rope": 368,
    "nvfp4_mla_nope": 304,
}
E4M3 = np.array(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
)
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def encode(latent: np.ndarray, rope: np.ndarray | None, layout: str) -> bytes:
    """One token, fp32 [512] and fp32 [64] or None, as a record."""
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        if layout.startswith("bf16"):
            record = _bf16_bytes(latent)
        elif layout.startswith("fp8"):
            tiles = latent.reshape(4, 128)
            scales = [_fp32_scale(tile, 448) for tile in tiles]
            record = b"".join(
                bytes(_codes(tile / scale, E4M3, 0x80)) for tile, scale in zip(tiles, scales, strict=True)
            )
            record += struct.pack("<4f", *scales)
        else:
            record = _encode_nvfp4(latent, rope, layout)
        if layout in ("bf16_mla", "fp8_ds_mla", "nvfp4_ds_mla"):
            record += _bf16_bytes(rope)
        elif layout == "nvfp4_ds_mla_fp8rope":
            record += bytes(_codes(rope / _fp32_scale(rope, 448), E4M3, 0x80))
    assert len(record) == RECORD_BYTES[layout]
    return record


def decode(record: bytes, layout: str) -> np.ndarray:
    """A record as fp32 [512] or [576]: latent, then RoPE part."""
    assert len(record) == RECORD_BYTES[layout]
    if layout.startswith("bf16"):
        return _bf16_values(record)
    if layout.startswith("fp8"):
        scales = np.array(struct.unpack_from("<4f", record, 512), np.float32)
        latent = _e4m3_values(record[:512]) * np.repeat(scales, 128)
        return latent if layout == "fp8_mla_nope" else np.concatenate([latent, _bf16_values(record[528:])])
    nibbles = np.array([code for byte in record[:256] for code in (byte & 15, byte >> 4)])
    codes = np.copysign(E2M1[nibbles & 7], np.where(nibbles & 8, -1.0, 1.0)).astype(np.float32)
    latent = codes * np.repeat(_e4m3_values(record[256:288]), 16)
    if layout == "nvfp4_ds_mla":
        return np.concatenate([latent, _bf16_values(record[304:])])
    rope_scale, token_scale = np.array(struct.unpack_from("<2f", record, 288), np.float32)
    latent = latent * (np.float32(1) if token_scale == 0 else token_scale)
    if layout == "nvfp4_mla_nope":
        return latent
    return np.concatenate([latent, _e4m3_values(record[304:]) * rope_scale])


def _encode_nvfp4(latent: np.ndarray, rope: np.ndarray | None, layout: str) -> bytes:
    groups = latent.reshape(32, 16)
    token_scale = np.float32(1) if layout == "nvfp4_ds_mla" else _fp32_scale(latent, 6 * 448)
    group_amax = np.abs(groups).max(1)
    scale_codes = _codes(group_amax / np.float32(6) / token_scale, E4M3, 0x80)
    scales = E4M3[scale_codes].astype(np.float32) * token_scale
    nibbles = [
        code
        for group, scale in zip(groups, scales, strict=True)
        for code in (_codes(group / scale, E2M1, 8) if scale else [0] * 16)
    ]
    record = bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True)) + bytes(scale_codes)
    if layout == "nvfp4_ds_mla":
        return record + bytes(16)
    rope_scale = 0.0 if rope is None else _fp32_scale(rope, 448)
    return record + struct.pack("<2f", rope_scale, token_scale) + bytes(8)


def _fp32_scale(values: np.ndarray, largest_code: int) -> np.float32:
    """Largest magnitude over the largest code; 1 where that is zero."""
    scale = np.abs(values).max() / np.float32(largest_code)
    return scale if scale > 0 else np.float32(1)


def _codes(values: np.ndarray, table: np.ndarray, sign_bit: int) -> list[int]:
    """The code nearest to each value, of two equally near the even one; beyond the table its end."""
    magnitudes = np.minimum(np.abs(values.astype(np.float64)), table[-1])
    distances = np.abs(magnitudes[:, None] - table)
    nearest = distances == distances.min(1, keepdims=True)
    even_first = np.argmax(nearest * np.where(np.arange(len(table)) % 2, 1, 2), 1)
    return [
        int(code) | (sign_bit if negative else 0) for code, negative in zip(even_first, np.signbit(values), strict=True)
    ]


def _bf16_bytes(values: np.ndarray) -> bytes:
    """Nearest bf16 of each value by comparing the two neighbours; a finite value stays finite."""
    words = []
    for value in values:
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        below, above = bits >> 16, (bits >> 16) + 1
        if above & 0x7FFF == 0x7F80:
            words.append(below)
            continue
        gap_below = abs(float(value)) - abs(float(_bf16_values(struct.pack("<H", below))[0]))
        gap_above = abs(float(_bf16_values(struct.pack("<H", above))[0])) - abs(float(value))
        if gap_below != gap_above:
            words.append(below if gap_below < gap_above else above)
        else:
            words.append(below if below % 2 == 0 else above)
    return struct.pack(f"<{len(words)}H", *words)


def _bf16_values(raw: bytes) -> np.ndarray:
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


def _e4m3_values(raw: bytes) -> np.ndarray:
    magnitudes = np.append(E4M3, np.nan)
    return np.array([np.copysign(magnitudes[code & 0x7F], -1.0 if code & 0x80 else 1.0) for code in raw], np.float32)
