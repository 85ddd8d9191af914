"""Operators of a sharded prefill, each with one mistake, as `prefill_ranks` calls them."""

import torch

from torch_sparse_mla.integrations import prefill_ranks

wait, remap, merge = prefill_ranks.c4_prefill_gather_wait, prefill_ranks.c4_remap, prefill_ranks.c4_merge_pools


def lose_a_record(records, plan, gathered, state, channel):
    wait(records, plan, gathered, state, channel)
    gathered[5] = 0


def shift_slots(topk, plan, sizes):
    slots, counts = remap(topk, plan, sizes)
    return torch.where(slots >= 0, slots + 1, slots), counts


def forget_the_tail(candidates, positions):
    topk, counts = merge(candidates, positions)
    return torch.where(topk >= (positions[:, None] + 1) // 4 * 4, -1, topk), counts
