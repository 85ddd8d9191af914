"""Decode cases whose cache is split into several, each in memory of its own."""

from dataclasses import dataclass, fields, replace

import torch

from .cases import POISON_BYTE, TAIL_BYTES, DecodeCase, move, with_outputs


@dataclass(frozen=True)
class PeerCase:
    """The arguments of one `sparse_ckv_decode_peers` call, in the operator's order."""

    q: torch.Tensor
    caches: list[torch.Tensor]
    indices: torch.Tensor
    lengths: torch.Tensor | None
    sink: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    workspace: torch.Tensor
    softmax_scale: float
    layout: str
    batch_invariant: bool

    def args(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))

    def to(self, device: str) -> "PeerCase":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: move(value, device) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved, caches=[move(cache, device) for cache in self.caches])


def split_cache(case: DecodeCase, owners: int) -> PeerCase:
    """The pages of a case dealt to `owners` caches, in order: the same indices name the same records.

    Pages that the case lacks are poison, and so is all that lies between pages.
    """
    pages = -(-case.cache.shape[0] // owners)
    _, page_size, record_bytes = case.cache.shape
    stride = page_size * record_bytes + TAIL_BYTES
    caches = []
    for owner in range(owners):
        storage = torch.full((pages * stride,), POISON_BYTE, dtype=torch.uint8)
        caches.append(storage.as_strided((pages, page_size, record_bytes), (stride, record_bytes, 1)))
        own = case.cache[owner * pages : (owner + 1) * pages]
        caches[owner][: len(own)] = own
    fresh = with_outputs(case, case.out.dtype)
    given = {field.name: getattr(fresh, field.name) for field in fields(fresh) if field.name != "cache"}
    return PeerCase(caches=caches, **given)
