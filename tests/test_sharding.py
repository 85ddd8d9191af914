"""DCP arithmetic against a plain Python model that deals tokens out like cards."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_sparse_mla import sharding

WORLDS = range(1, 9)
INTERLEAVES = (1, 2, 4, 8, 16, 64)
GEOMETRIES = list(itertools.product(WORLDS, INTERLEAVES))
geometry = pytest.mark.parametrize(("world", "interleave"), GEOMETRIES, ids=lambda n: str(n))


def deal(length: int, world: int, interleave: int) -> list[list[int]]:
    """Each rank's tokens in order, dealt `interleave` at a time."""
    hands = [[] for _ in range(world)]
    for token in range(length):
        hands[token // interleave % world].append(token)
    return hands


def local_slot_model(token, blocks, page_size, rank, world, interleave, stride_rows):
    hand = deal(max(token, 0) + 1, world, interleave)[rank]
    if token < 0 or not hand or hand[-1] != token:
        return -1
    block, offset = divmod(len(hand) - 1, page_size)
    return blocks[block] * stride_rows + offset if block < len(blocks) and blocks[block] >= 0 else -1


@geometry
def test_matches_dealing(world, interleave):
    hands = deal(300, world, interleave)
    tokens = torch.arange(300, dtype=torch.int32)
    owners = sharding.owner(tokens, world, interleave)
    positions = sharding.local_position(tokens, world, interleave)
    for rank, hand in enumerate(hands):
        assert (owners == rank).nonzero().flatten().tolist() == hand
        assert positions[owners == rank].tolist() == list(range(len(hand)))
        assert sharding.global_position(rank, torch.arange(len(hand)), world, interleave).tolist() == hand
    lengths = torch.arange(301, dtype=torch.int32)
    for rank, hand in enumerate(hands):
        counts = [sum(token < length for token in hand) for length in range(301)]
        assert sharding.local_length(rank, lengths, world, interleave).tolist() == counts


@geometry
def test_local_lengths_sum_to_the_length_around_two_to_the_31(world, interleave):
    lengths = torch.arange(2**31 - 600, 2**31 + 600)
    parts = torch.stack([sharding.local_length(rank, lengths, world, interleave) for rank in range(world)])
    assert torch.equal(parts.sum(0), lengths)
    assert (parts.amax(0) - parts.amin(0) <= interleave).all()
    assert parts[:, 7].tolist() == [
        sharding.local_length(rank, 2**31 - 593, world, interleave) for rank in range(world)
    ]


@given(st.integers(0, 2**33), st.sampled_from(GEOMETRIES))
def test_global_position_inverts_owner_and_local_position(token, shape):
    rank, local = sharding.owner(token, *shape), sharding.local_position(token, *shape)
    assert 0 <= rank < shape[0]
    assert sharding.global_position(rank, local, *shape) == token
    as_tensor = torch.tensor([token])
    assert sharding.owner(as_tensor, *shape).tolist() == [rank]
    assert sharding.local_position(as_tensor, *shape).tolist() == [local]


@given(st.integers(0, 2**32), st.sampled_from(GEOMETRIES), st.data())
def test_owner_and_local_position_invert_global_position(local, shape, data):
    rank = data.draw(st.integers(0, shape[0] - 1))
    token = sharding.global_position(rank, local, *shape)
    assert (sharding.owner(token, *shape), sharding.local_position(token, *shape)) == (rank, local)


@given(st.integers(0, 2**33), st.sampled_from(GEOMETRIES))
def test_local_length_grows_by_one_at_the_owner(token, shape):
    before = [sharding.local_length(rank, token, *shape) for rank in range(shape[0])]
    after = [sharding.local_length(rank, token + 1, *shape) for rank in range(shape[0])]
    owner = sharding.owner(token, *shape)
    assert before[owner] == sharding.local_position(token, *shape)
    assert [b + (rank == owner) for rank, b in enumerate(before)] == after
    assert sharding.local_length(owner, torch.tensor(token), *shape) == before[owner]


def test_int32_tensors_hold_positions_up_to_their_end():
    tokens = torch.arange(2**31 - 1200, 2**31 - 1, dtype=torch.int64)
    for world, interleave in GEOMETRIES:
        for function in (sharding.owner, sharding.local_position):
            assert torch.equal(function(tokens.int(), world, interleave).long(), function(tokens, world, interleave))


@pytest.mark.parametrize("stride_rows", [None, 16, 19], ids=["packed", "stride16", "stride19"])
@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 4), (3, 16), (4, 1), (8, 2)], ids=lambda n: str(n))
def test_local_slots_match_the_model(world, interleave, stride_rows, generator):
    page_size, blocks = 16, 3
    table = torch.randperm(100, generator=generator)[: 2 * blocks].reshape(2, blocks).int()
    table[1, 1] = -1
    tokens = torch.randint(-3, page_size * blocks * world + 40, (2, 4, 25), generator=generator, dtype=torch.int32)
    owned = 0
    for rank in range(world):
        slots = sharding.local_slots(tokens, table, page_size, rank, world, interleave, stride_rows)
        assert slots.dtype == torch.int64
        expected = [
            [
                [
                    local_slot_model(int(t), table[i].tolist(), page_size, rank, world, interleave, stride_rows or 16)
                    for t in row
                ]
                for row in tokens[i]
            ]
            for i in range(2)
        ]
        assert slots.tolist() == expected
        owned += (slots >= 0).long()
    assert owned.max() == 1, "no token is on two ranks"


def test_local_slots_pass_two_to_the_31():
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    assert sharding.local_slots(torch.tensor([[7]]), table, 64, 0, 1, 1).tolist() == [[(2**31 - 1) * 64 + 7]]
    assert sharding.local_slots(torch.tensor([[2**40]]), table, 64, 0, 1, 1).tolist() == [[-1]]


def test_local_slots_of_nothing():
    tokens, table = torch.tensor([[0, 5], [-1, 2**31]]), torch.zeros(2, 0, dtype=torch.int32)
    assert sharding.local_slots(tokens, table, 16, 0, 2, 4).tolist() == [[-1, -1], [-1, -1]]
    assert sharding.local_slots(tokens[:0], table[:0], 16, 0, 2, 4).shape == (0, 2)
    assert sharding.local_slots(torch.zeros(0, 2), torch.zeros(0, 3, dtype=torch.int32), 16, 0, 2, 4).shape == (0, 2)


@pytest.mark.parametrize(
    ("page_size", "rank", "world", "interleave", "message"),
    [
        (16, 0, 0, 1, "rank, world: got 0, 0; allowed: 0 <= rank < world"),
        ("16", 0, 2, 1, "page_size: got '16'; allowed: an integer"),
        (16, 0, 2, 4.0, "interleave: got 4.0; allowed: an integer"),
        (16, 2, 2, 1, "rank, world: got 2, 2"),
        (16, -1, 2, 1, "rank, world: got -1, 2"),
        (16, 0, 2, 0, "page_size, interleave: got 16, 0; allowed: a page size that is a multiple"),
        (16, 0, 2, 3, "page_size, interleave: got 16, 3"),
        (0, 0, 2, 1, "page_size, interleave: got 0, 1"),
    ],
)
def test_rejects_geometry(page_size, rank, world, interleave, message):
    with pytest.raises(ValueError, match=message):
        sharding.check_geometry(page_size, rank, world, interleave)
    with pytest.raises(ValueError, match=message):
        sharding.local_slots(torch.tensor([[0]]), torch.tensor([[0]]), page_size, rank, world, interleave)


def test_rejects_shapes_and_stride():
    table = torch.zeros(2, 3, dtype=torch.int32)
    for tokens, blocks in ((torch.tensor(0), table), (torch.zeros(3, 1), table), (torch.zeros(2, 1), table[0])):
        with pytest.raises(ValueError, match=r"tokens, block_table: got shapes .*; allowed: \[requests, ...\]"):
            sharding.local_slots(tokens, blocks, 16, 0, 1, 1)
    with pytest.raises(ValueError, match="stride_rows: got 15; allowed: None, or at least the page size 16"):
        sharding.local_slots(torch.zeros(2, 1), table, 16, 0, 1, 1, stride_rows=15)


def test_global_positions_of_int32_tensors_pass_two_to_the_31():
    local = torch.tensor([2**30], dtype=torch.int32)
    assert sharding.global_position(3, local, 8, 4).tolist() == [sharding.global_position(3, 2**30, 8, 4)]
