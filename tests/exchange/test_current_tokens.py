"""Prefetched Shared layers: an exchange that precedes this step's writes, and the patch that makes up for it."""

import pytest
import torch

from torch_sparse_mla import (
    LAYOUTS,
    ce_exchange_start,
    ce_exchange_wait,
    current_token_slots,
    quantise_records,
    write_ckv_records,
)

from .cases import Shape, make_step, make_world

LAYOUT = "fp8_ds_mla"
SHAPE = Shape(world=3, requests=3, rows_per_request=2, topk=6, record_bytes=LAYOUTS[LAYOUT].record_bytes)
# By request: both rows' tokens selected, one of them by the other row only; none selected; one, and a padded row.
LENGTHS = [41, 42, 30, 31, 7, 0]
TOPK = [
    [40, 3, -1, 41, 9, 5],
    [9, -1, 40, 2, 1, 0],
    [8, -1, 4, 3, 28, -1],
    [41, 40, 6, 28, 1, 0],
    [-1, -1, 6, 2, -1, 1],
    [-1, -1, -1, -1, -1, -1],
]


def test_patched_workspaces_equal_an_exchange_after_the_write(generator, device):
    world = make_world(SHAPE, device)
    step = make_step(SHAPE, generator)
    step.topk = torch.tensor(TOPK, dtype=torch.int32)
    world.load(step)
    latent, rope = torch.randn(6, 512, generator=generator), torch.randn(6, 64, generator=generator)
    for rank, channel in world.both():
        ce_exchange_start(*rank.arguments(channel))
    for row, length in enumerate(LENGTHS):
        if length:
            step.records[:, row // 2, length - 1] = quantise_records(latent[row], rope[row], LAYOUTS[LAYOUT])
    topk, lengths = step.topk.to(device), torch.tensor(LENGTHS, device=device)
    for rank, channel in world.both():
        ce_exchange_wait(*rank.arguments(channel))
        with pytest.raises(AssertionError, match="layer 0"):
            rank.assert_arrived(step)
        slots = current_token_slots(topk, lengths, SHAPE.selection, rank.plan)
        for workspace in rank.workspaces:
            # A workspace is a cache of one page.
            write_ckv_records(latent.to(device), rope.to(device), slots, workspace.unsqueeze(0), LAYOUT)
        rank.assert_arrived(step)
    world.close()
