"""Gather-only: what memory alone costs. Loads every byte of every selected record and keeps one word of each block.

No decode kernel can be faster than reading its records, and random records cannot be read at the bandwidth of a copy:
this kernel, not the byte floor, is what a decode kernel is judged by.
"""

import torch
import triton
import triton.language as tl

TOKENS_PER_PROGRAM = 16
WORD_BYTES = 4


def num_blocks(topk: int) -> int:
    """Words that `gather_records` writes for each row."""
    return triton.cdiv(topk, TOKENS_PER_PROGRAM)


def gather_records(cache: torch.Tensor, indices: torch.Tensor, sums: torch.Tensor) -> None:
    """Sum of all words, folded to 16 bits, of the records in each block of 16 list entries.

    Args:
        cache: [pages, page_size, record_bytes] uint8, contiguous.
        indices: [rows, K] int32 valid slots, contiguous.
        sums: [rows, num_blocks(K)] int32; overwritten.
    """
    rows, topk = indices.shape
    words = cache.shape[2] // WORD_BYTES
    _gather_kernel[(num_blocks(topk), rows)](
        cache.view(torch.int32),
        indices,
        sums,
        topk,
        WORDS=words,
        WORDS_PADDED=triton.next_power_of_2(words),
        TOKENS=TOKENS_PER_PROGRAM,
        num_warps=4,
    )


def expected_sums(cache: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """What `gather_records` writes, in plain PyTorch."""
    rows, topk = indices.shape
    words = cache.view(torch.int32).flatten(0, 1)[indices.long().flatten()]
    per_record = ((words ^ (words >> 16)) & 0xFFFF).sum(-1).view(rows, topk)
    padded = torch.nn.functional.pad(per_record, (0, num_blocks(topk) * TOKENS_PER_PROGRAM - topk))
    return padded.view(rows, -1, TOKENS_PER_PROGRAM).sum(-1).to(torch.int32)


@triton.jit
def _gather_kernel(cache, indices, sums, topk, WORDS: tl.constexpr, WORDS_PADDED: tl.constexpr, TOKENS: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1)
    entry = block * TOKENS + tl.arange(0, TOKENS)
    live = entry < topk
    slot = tl.load(indices + row * topk + entry, mask=live, other=0).to(tl.int64)
    word = tl.arange(0, WORDS_PADDED)
    # WORDS is a multiple of 4 in every layout, so a load of 16 bytes never crosses its end.
    mask = live[:, None] & (word < WORDS)[None, :]
    values = tl.load(cache + slot[:, None] * WORDS + word[None, :], mask=mask, other=0)
    # Every bit counts, and 16 records of 512 words cannot overflow the sum.
    folded = (values ^ (values >> 16)) & 0xFFFF
    tl.store(sums + row * tl.num_programs(0) + block, tl.sum(tl.sum(folded, 1), 0))
