"""Record layouts: which bytes of one cached token hold what.

A *record* is one token's compressed key/value (CKV) of one layer, shared by all query heads. This table is the only
place that knows byte offsets; kernels take them from here (the C++ constants are asserted equal in the tests).
"""

from dataclasses import dataclass

LATENT_DIM = 512
ROPE_DIM = 64
E4M3_MAX = 448.0
E2M1_MAX = 6.0


@dataclass(frozen=True)
class RecordLayout:
    """Byte layout of one record. All offsets are in bytes from the start of the record.

    Attributes:
        name: the string that operators take as `layout`.
        record_bytes: width of a record; always a multiple of 16.
        latent: storage type of the 512 latents at offset 0: "bf16", "e4m3" (a byte each) or "e2m1" (two a byte,
            the even index in the low nibble).
        group_size: latents that share one scale (0: no scales).
        scale_offset: first group scale; fp32 for "e4m3", e4m3 for "e2m1".
        token_scale_offset: fp32 scale of the whole token, or None. A stored 0.0 means "no token scale" (1.0).
        rope: storage type of the 64 RoPE values: "bf16", "e4m3" or None.
        rope_offset, rope_scale_offset: first RoPE value; its fp32 scale ("e4m3" only).
    """

    name: str
    record_bytes: int
    latent: str
    group_size: int = 0
    scale_offset: int | None = None
    token_scale_offset: int | None = None
    rope: str | None = None
    rope_offset: int | None = None
    rope_scale_offset: int | None = None

    @property
    def query_dim(self) -> int:
        """Width of an absorbed query: 512 latents, then 64 RoPE values where the layout has them."""
        return LATENT_DIM + (ROPE_DIM if self.rope else 0)


LAYOUTS: dict[str, RecordLayout] = {
    layout.name: layout
    for layout in (
        RecordLayout("bf16_mla", 1152, "bf16", rope="bf16", rope_offset=1024),
        RecordLayout("bf16_mla_nope", 1024, "bf16"),
        RecordLayout("fp8_ds_mla", 656, "e4m3", group_size=128, scale_offset=512, rope="bf16", rope_offset=528),
        RecordLayout("fp8_mla_nope", 528, "e4m3", group_size=128, scale_offset=512),
        RecordLayout("nvfp4_ds_mla", 432, "e2m1", group_size=16, scale_offset=256, rope="bf16", rope_offset=304),
        RecordLayout(
            "nvfp4_ds_mla_fp8rope",
            368,
            "e2m1",
            group_size=16,
            scale_offset=256,
            token_scale_offset=292,
            rope="e4m3",
            rope_offset=304,
            rope_scale_offset=288,
        ),
        RecordLayout("nvfp4_mla_nope", 304, "e2m1", group_size=16, scale_offset=256, token_scale_offset=292),
    )
}
