"""`c4_write_index_keys` against the definition in float64, over chunks, ranks and rejected drafts; what it refuses."""

import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla.indexer import reference

from ..decode.rejections import expect_rejection
from .cases import (
    FORMS,
    POISON,
    WriteCase,
    assert_close_key,
    device_of,
    empty_pools,
    every_form,
    every_implementation,
    write_case,
)

OP = "c4_write_index_keys"
op = torch.ops.torch_sparse_mla.c4_write_index_keys.default


def write(implementation: str, case: WriteCase, parts: list[tuple[int, int]], **options: object) -> None:
    function = reference.c4_write_index_keys if implementation == "reference" else op
    function(*case.args(parts, **options))


def is_poison(tensor: torch.Tensor) -> bool:
    return bool((tensor.contiguous().view(torch.uint8) == POISON).all())


@every_implementation
@every_form
def test_whole_prompts(implementation, form):
    case = write_case(form, device=device_of(implementation))
    write(implementation, case, [(0, 37), (0, 6), (0, 90)])
    case.assert_pools([37, 6, 90])


@every_implementation
@every_form
@pytest.mark.parametrize("step", [1, 2, 3, 5, 8, 23])
def test_pools_that_are_spread_over_calls(implementation, form, step):
    """Chunked prefill and decode: what is not whole waits in the ring, and calls of any length give the same bits."""
    device = device_of(implementation)
    case, at_once = (write_case(form, device=device, seed=step) for _ in range(2))
    for begin in range(0, 90, step):
        parts = [(min(begin, len(key)), min(begin + step, len(key))) for key in case.keys]
        write(implementation, case, parts)
    case.assert_pools([37, 6, 90])
    write(implementation, at_once, [(0, 37), (0, 6), (0, 90)])
    assert torch.equal(case.pools.contiguous().view(torch.uint8), at_once.pools.contiguous().view(torch.uint8))


@every_implementation
@every_form
@pytest.mark.parametrize("world, interleave, page_size", [(2, 4, 256), (3, 8, 512), (4, 64, 256)])
def test_each_rank_writes_its_own_pools_and_nothing_else(implementation, form, world, interleave, page_size):
    lengths = (1_100, 300)
    for rank in range(world):
        geometry = {"world": world, "rank": rank, "interleave": interleave, "page_size": page_size}
        case = write_case(form, lengths, **geometry, device=device_of(implementation), gap=64)
        write(implementation, case, [(0, 1_000), (0, 299)])
        write(implementation, case, [(1_000, 1_100), (299, 300)])
        case.assert_pools(list(lengths))
        own = sum(case.stored(request, pool) is not None for request in (0, 1) for pool in range(lengths[request] // 4))
        untouched = empty_pools(form, len(case.pools), page_size, gap=64)
        before, after = (case_pools.cpu().contiguous() for case_pools in (untouched, case.pools))
        if form != "serving":
            written = (before.view(torch.uint8) != after.view(torch.uint8)).view(-1, 128 * FORMS[form].itemsize).any(1)
            assert int(written.sum()) == own


@every_implementation
@pytest.mark.parametrize("accepted", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("start", [8, 9, 10, 11])
def test_rejected_drafts_leave_nothing_in_the_ring(implementation, accepted, start):
    """A call of six tokens of which the last are drafts; some are rejected, and the next call brings other tokens."""
    case = write_case("fp32", (40,), slots=8, device=device_of(implementation), seed=accepted)
    wrong = write_case("fp32", (40,), slots=8, seed=99)
    write(implementation, case, [(0, start)])
    keys, gates = case.keys[0].clone(), case.gates[0].clone()
    case.keys[0][start + accepted :], case.gates[0][start + accepted :] = wrong.keys[0][:1], wrong.gates[0][:1]
    write(implementation, case, [(start, start + 6)], drafts=5)
    case.keys[0], case.gates[0] = keys, gates
    write(implementation, case, [(start + accepted, start + accepted + 1)], drafts=5)
    write(implementation, case, [(start + accepted + 1, 40)])
    case.assert_pools([40])


@every_implementation
@pytest.mark.parametrize("bad", [{"ring_rows": [-1, 1]}, {"ring_rows": [3, 1]}])
def test_a_padded_request_writes_nothing(implementation, bad):
    case = write_case("fp32", (20, 20), device=device_of(implementation))
    write(implementation, case, [(0, 20), (0, 20)], **bad)
    first = case.block_table[0].tolist()
    assert is_poison(case.pools[first]) and is_poison(case.ring[0]) and is_poison(case.ring[2])
    assert_close_key(case.stored(1, 4), case.pooled(1, 4), "fp32", "the other request")


@every_implementation
@pytest.mark.parametrize("start", [2**31 - 20, 2**31 - 1, -1])
def test_positions_beyond_int32_write_nothing(implementation, start):
    """Neither into the ring nor around it; a request with as many tokens before the limit is written."""
    case = write_case("fp32", (20, 20, 20), device=device_of(implementation))
    arguments = case.args([(0, 20)] * 3)
    arguments[4][:2] = torch.tensor([2**31 - 21, start])
    function = reference.c4_write_index_keys if implementation == "reference" else op
    function(*arguments)
    assert not is_poison(case.ring[0]) and is_poison(case.ring[1])
    assert_close_key(case.stored(2, 4), case.pooled(2, 4), "fp32", "the last request")


@every_implementation
def test_requests_without_new_tokens_and_empty_calls(implementation):
    case = write_case("fp32", (20, 20), device=device_of(implementation))
    write(implementation, case, [(0, 0), (0, 18)])
    write(implementation, case, [(0, 0), (18, 18)])
    assert is_poison(case.ring[0])
    write(implementation, case, [(0, 20), (18, 20)])
    case.assert_pools([20, 20])


@every_implementation
def test_a_prefix_hit_needs_no_ring(implementation):
    """Tokens before a whole pool's end are not read: here the ring holds poison."""
    case = write_case("fp32", (64,), device=device_of(implementation))
    write(implementation, case, [(32, 64)])
    for pool in range(8, 16):
        assert_close_key(case.stored(0, pool), case.pooled(0, pool), "fp32", f"pool {pool}")
    assert is_poison(case.pools[int(case.block_table[0, 0]), :8])


@every_implementation
def test_ring_rows_are_the_requests_own(implementation):
    """Requests change their place in the batch; the ring row stays."""
    case = write_case("fp32", (22, 22), device=device_of(implementation))
    write(implementation, case, [(0, 9), (0, 10)], ring_rows=[2, 0])
    case.keys, case.gates = case.keys[::-1], case.gates[::-1]
    case.block_table = case.block_table.flip(0)
    write(implementation, case, [(10, 22), (9, 22)], ring_rows=[0, 2])
    case.assert_pools([22, 22])


@every_implementation
def test_pages_that_are_missing_are_skipped(implementation):
    case = write_case("fp32", (600,), page_size=256, device=device_of(implementation))
    pages = case.block_table[0].tolist()
    for bad in (-1, 2**31 - 1, len(case.pools)):
        case.block_table[0, 1] = bad
        write(implementation, case, [(0, 600)])
        assert is_poison(case.pools[pages[1]])
    case.block_table = case.block_table[:, :1]
    write(implementation, case, [(0, 600)])
    case.assert_pools([256])


@every_implementation
def test_extreme_keys(implementation):
    """Zeros, one outlier, and gates so far apart that one token takes it all: finite codes, a scale that fits."""
    case = write_case("serving", (12,), device=device_of(implementation))
    case.keys[0][:4] = 0
    case.keys[0][4:8] = 0
    case.keys[0][4:8, 5] = 3e4
    case.gates[0][8:12] = 0
    case.gates[0][9] = 1e4
    write(implementation, case, [(0, 12)])
    case.assert_pools([12])
    assert torch.equal(case.stored(0, 0), torch.zeros(128, dtype=torch.float64))


@every_implementation
def test_what_is_not_finite_spoils_its_own_pool_alone(implementation):
    case = write_case("serving", (12,), device=device_of(implementation))
    clean = write_case("serving", (12,), device=device_of(implementation))
    case.keys[0][5, 7] = float("inf")
    case.gates[0][6, 3] = float("nan")
    write(implementation, case, [(0, 12)])
    write(implementation, clean, [(0, 12)])
    for pool in (0, 2):
        assert torch.equal(case.stored(0, pool), clean.stored(0, pool))


def test_the_scale_is_the_least_power_of_two_that_does_not_saturate():
    from torch_sparse_mla.indexer.codec import quantise

    for largest, expected in ((448.0, 1.0), (449.0, 2.0), (447.0, 1.0), (224.0, 0.5), (1.0, 2.0**-8), (0.0, 1.0)):
        values = torch.zeros(1, 128)
        values[0, 3] = -largest
        codes, scale = quantise(values)
        assert scale.item() == expected
        assert codes.view(torch.float8_e4m3fn).float().isfinite().all()
    assert quantise(torch.full((1, 128), 1e-40))[1].item() == 2.0**-126


def test_public_function():
    case = write_case("fp32")
    given = case.args([(0, 37), (0, 6), (0, 90)])
    torch_sparse_mla.c4_write_index_keys(*given[:9], page_size=256, interleave=4)
    case.assert_pools([37, 6, 90])
    keys = given[0].clone().requires_grad_()
    with expect_rejection(OP, "keys", "torch.no_grad()"):
        torch_sparse_mla.c4_write_index_keys(keys, *given[1:9], page_size=256)


@every_implementation
@pytest.mark.parametrize(
    "position, change, argument, allowed",
    [
        (0, lambda t: t.half(), "keys", "dtype float32 or bfloat16"),
        (0, lambda t: t[:, :64], "keys", "shape [tokens, 128]"),
        (1, lambda t: t[:-1], "gates", "those of keys"),
        (1, lambda t: t.bfloat16(), "gates", "dtype float32"),
        (2, lambda t: t[:3], "bias", "tokens of a pool, channels"),
        (3, lambda t: t[:-1], "row_starts", "requests + 1"),
        (4, lambda t: t.long(), "starts", "dtype int32"),
        (5, lambda t: t[:1], "ring_rows", "requests"),
        (6, lambda t: t[0], "block_table", "shape [requests, blocks]"),
        (7, lambda t: t[:, :3].contiguous(), "ring", "a multiple of 4 slots"),
        (7, lambda t: t.bfloat16(), "ring", "dtype float32"),
        (8, lambda t: t[:, :-1], "pools", "shape [pages, 64, 128]"),
        (8, lambda t: t.half(), "pools", "dtype uint8 or float32 or bfloat16"),
        (8, lambda t: t[:1].expand(3, -1, -1), "pools", "no less than a page"),
        (9, lambda n: 512, "pools", "shape [pages, 128, 128]"),
        (9, lambda n: 258, "page_size", "a multiple of the interleave 4 and of 4"),
        (10, lambda n: 3, "page_size", "a multiple of the interleave 3"),
        (12, lambda n: 0, "rank", "0 <= rank < world"),
        (13, lambda n: 2, "ring", "5 or more, or 2 rejected drafts would overwrite accepted tokens"),
        (13, lambda n: -1, "drafts", "0 or more"),
    ],
)
def test_rejects(implementation, position, change, argument, allowed):
    case = write_case("fp32", device=device_of(implementation))
    arguments = list(case.args([(0, 37), (0, 6), (0, 90)]))
    arguments[position] = change(arguments[position])
    with expect_rejection(OP, argument, allowed):
        (reference.c4_write_index_keys if implementation == "reference" else op)(*arguments)
    assert is_poison(case.ring) and is_poison(case.pools)


@pytest.mark.parametrize(
    "form, change, argument, allowed",
    [
        ("serving", {"page_size": 128}, "page_size", "a multiple of 256 tokens, an index page"),
        ("fp32", {"page_size": 128}, "page_size", "a multiple of 256 tokens, an index page"),
        ("fp32", {"world": 2, "interleave": 2}, "interleave", "or a pool is split between ranks"),
        ("fp32", {"world": 2, "interleave": 6, "page_size": 252}, "interleave", "a multiple of 4"),
    ],
)
def test_rejects_geometries_that_split_a_pool_or_an_index_page(form, change, argument, allowed):
    arguments = list(write_case(form).args([(0, 37), (0, 6), (0, 90)]))
    for name, value in change.items():
        arguments[{"page_size": 9, "interleave": 10, "world": 12}[name]] = value
    with expect_rejection(OP, argument, allowed):
        op(*arguments)


@every_implementation
@pytest.mark.parametrize(
    "position, values, argument",
    [
        (0, float("nan"), "keys"),
        (1, float("inf"), "gates"),
        (3, [0, 20, 10], "row_starts"),
        (4, [0, -1], "starts"),
        (4, [0, 250], "starts"),
        (5, [0, 3], "ring_rows"),
    ],
)
def test_checked_mode_names_the_first_bad_value(implementation, position, values, argument, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    case = write_case("fp32", (20, 20), device=device_of(implementation))
    write(implementation, case, [(0, 20), (0, 20)], ring_rows=[-1, 1])
    case = write_case("fp32", (20, 20), device=device_of(implementation))
    arguments = list(case.args([(0, 20), (0, 20)]))
    if isinstance(values, float):
        arguments[position][3, 4] = values
    else:
        arguments[position] = torch.tensor(values, dtype=torch.int32, device=case.ring.device)
    with expect_rejection(OP, argument, ""):
        (reference.c4_write_index_keys if implementation == "reference" else op)(*arguments)
    assert is_poison(case.ring) and is_poison(case.pools)


@every_form
def test_opcheck(form):
    torch.library.opcheck(op, write_case(form).args([(0, 37), (0, 6), (0, 90)]))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_results_equal_eager(backend):
    torch._dynamo.reset()
    case = write_case("bf16")
    arguments = case.args([(0, 37), (0, 6), (0, 90)])

    def function(*tensors):
        torch_sparse_mla.c4_write_index_keys(*tensors, page_size=256, interleave=4)
        return tensors[8]

    with torch.no_grad():
        torch.compile(function, fullgraph=True, backend=backend)(*arguments[:9])
    case.assert_pools([37, 6, 90])
