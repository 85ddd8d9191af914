"""Decode context parallelism (DCP): which rank owns which token. Pure arithmetic on ints or integer tensors.

A request's tokens are dealt to `world` ranks in runs of `interleave` consecutive tokens. `token` is the global,
request-relative position; `local` is the position among the tokens of one rank. Every length is a global one.
"""

import torch

Positions = int | torch.Tensor


def owner(token: Positions, world: int, interleave: int) -> Positions:
    """The rank that holds a token."""
    return token // interleave % world


def local_position(token: Positions, world: int, interleave: int) -> Positions:
    """A token's position among those of its owner."""
    return token // (world * interleave) * interleave + token % interleave


def global_position(rank: int, local: Positions, world: int, interleave: int) -> Positions:
    """The token at position `local` of a rank, the inverse of the two above. A tensor comes back as int64."""
    local = local.long() if isinstance(local, torch.Tensor) else local
    return (local // interleave * world + rank) * interleave + local % interleave


def local_length(rank: int, length: Positions, world: int, interleave: int) -> Positions:
    """How many of a request's first `length` tokens a rank holds."""
    period = interleave * world
    rest = length % period - rank * interleave
    rest = rest.clamp(0, interleave) if isinstance(rest, torch.Tensor) else min(max(rest, 0), interleave)
    return length // period * interleave + rest


def local_slots(
    tokens: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    rank: int,
    world: int,
    interleave: int,
    stride_rows: int | None = None,
) -> torch.Tensor:
    """Slots of tokens in a rank's own cache; -1 where the rank does not have them.

    Args:
        tokens: [requests, ...] integer global positions; negative: absent.
        block_table: [requests, blocks] integer page numbers, the same on every rank.
        page_size: records in a page; a multiple of `interleave`.
        rank, world, interleave: the DCP geometry.
        stride_rows: slots from one page to the next, where pages lie among other pages; None: `page_size`.
    Returns: int64, the shape of `tokens`; -1 for a negative token, another rank's token, or one beyond the table.
    Raises: ValueError for a geometry that cannot be, or shapes that do not fit together.
    """
    check_geometry(page_size, rank, world, interleave)
    if tokens.dim() < 1 or block_table.dim() != 2 or len(tokens) != len(block_table):
        raise ValueError(
            f"torch_sparse_mla.sharding: tokens, block_table: got shapes {list(tokens.shape)}, "
            f"{list(block_table.shape)}; allowed: [requests, ...], [requests, blocks]"
        )
    if stride_rows is not None and stride_rows < page_size:
        raise ValueError(
            f"torch_sparse_mla.sharding: stride_rows: got {stride_rows}; allowed: None, or at least the page size "
            f"{page_size}"
        )
    tokens = tokens.long()
    if block_table.shape[1] == 0:
        return torch.full_like(tokens, -1)
    local = local_position(tokens, world, interleave)
    block = local // page_size
    present = (tokens >= 0) & (owner(tokens, world, interleave) == rank) & (block < block_table.shape[1])
    rows = torch.arange(len(tokens), device=tokens.device).reshape(-1, *[1] * (tokens.dim() - 1)).expand_as(tokens)
    pages = block_table.long()[rows, torch.where(present, block, 0)]
    slots = pages * (page_size if stride_rows is None else stride_rows) + local % page_size
    return torch.where(present & (pages >= 0), slots, -1)


def check_geometry(page_size: int, rank: int, world: int, interleave: int) -> None:
    """Raise ValueError for a DCP geometry that cannot be."""
    given = {"page_size": page_size, "rank": rank, "world": world, "interleave": interleave}
    for name, value in given.items():
        if not isinstance(value, int):
            raise ValueError(f"torch_sparse_mla.sharding: {name}: got {value!r}; allowed: an integer")
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"torch_sparse_mla.sharding: rank, world: got {rank}, {world}; allowed: 0 <= rank < world")
    if interleave < 1 or page_size < 1 or page_size % interleave:
        raise ValueError(
            f"torch_sparse_mla.sharding: page_size, interleave: got {page_size}, {interleave}; "
            "allowed: a page size that is a multiple of the interleave"
        )
