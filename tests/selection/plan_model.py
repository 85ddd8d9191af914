"""`plan_selection` in plain Python: lists and dictionaries, from the rules alone."""


def resolve(position: int, pages: list[int], page_size: int, interleave: int, world: int) -> tuple[int, int] | None:
    """(owner, slot) of a position, by walking the tokens' deal; None where it names no record."""
    if position < 0:
        return None
    run, within = divmod(position, interleave)
    turn, owner = divmod(run, world)
    block, offset = divmod(turn * interleave + within, page_size)
    if block >= len(pages) or pages[block] < 0:
        return None
    slot = pages[block] * page_size + offset
    return (owner, slot) if pages[block] * page_size + page_size - 1 < 2**31 else None


def plan(
    topk: list[list[int]],
    block_table: list[list[int]],
    rows_per_request: int,
    page_size: int,
    interleave: int,
    rank: int,
    world: int,
    reserved_requests: int,
    reserved_rows_per_request: int,
    list_length: int,
) -> dict[str, list]:
    """The four views as nested lists."""
    capacity = reserved_rows_per_request * list_length
    remap = [[-1] * list_length for _ in range(reserved_requests * reserved_rows_per_request)]
    owned_slots = [-1] * (reserved_requests * capacity)
    owner_offsets = [[0] * (world + 1) for _ in range(reserved_requests)]
    counts = [0] * reserved_requests
    for request, pages in enumerate(block_table):
        rows = range(request * rows_per_request, (request + 1) * rows_per_request)
        segments: list[dict[int, int]] = [{} for _ in range(world)]
        for row in rows:
            for position in topk[row]:
                found = resolve(position, pages, page_size, interleave, world)
                if found:
                    segments[found[0]].setdefault(position, found[1])
        union = [position for segment in segments for position in segment]
        for row in rows:
            for column, position in enumerate(topk[row]):
                if position in union:
                    remap[row][column] = request * capacity + union.index(position)
        for owner in range(world):
            owner_offsets[request][owner + 1] = owner_offsets[request][owner] + len(segments[owner])
        counts[request] = len(union)
        for place, slot in enumerate(segments[rank].values()):
            owned_slots[request * capacity + place] = slot
    return {"remap": remap, "owner_offsets": owner_offsets, "owned_slots": owned_slots, "counts": counts}
