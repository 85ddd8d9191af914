"""`c4_select` against the plain-Python model, exactly; against itself on other ranks and lists; what it refuses."""

import dataclasses
import itertools
import re

import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla import c4_select_workspace_bytes
from torch_sparse_mla.indexer import api, reference, triton_kernels_select
from torch_sparse_mla.indexer.contract import FULL_ROWS, MANY_ROWS
from torch_sparse_mla.indexer.pools import ABSENT, candidates_of, pools_of, scores_of
from torch_sparse_mla.indexer.triton_kernels_select import order_form, select_form

from ..compiled_triton import compiled
from ..decode.rejections import expect_rejection
from .cases import (
    FORMS,
    SelectCase,
    decoded,
    device_of,
    encode,
    every_form,
    every_implementation,
    orders_case,
    poisoned,
    select_case,
    write_pool,
)

OP = "c4_select"
op = torch.ops.torch_sparse_mla.c4_select.default


def selected(implementation: str, case: SelectCase, gap: int = 0) -> torch.Tensor:
    arguments = case.args(device_of(implementation), gap)
    (reference.c4_select if implementation == "reference" else op)(*arguments)
    return arguments[6].cpu()


@every_implementation
def test_two_pools(implementation):
    """The second one scores higher, and is seen from its last token on."""
    case = select_case(pools=(2,), rows=((0, 7), (0, 6), (0, 3), (0, 2)))
    case.keys[0][0], case.keys[0][1] = 1, 2
    case.values.fill_(1), case.weights.fill_(0.25)
    case.scales[0][:] = [1.0, 1.0]
    first, second = 16 * 0.25 * 128, 16 * 0.25 * 256
    assert decoded(selected(implementation, case)) == [[[(second, 1), (first, 0)], [(first, 0)], [(first, 0)], []]]


@every_implementation
@every_form
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_matches_model(implementation, form, heads):
    case = select_case(form, heads=heads, seed=heads)
    assert decoded(selected(implementation, case)) == case.expected()


@every_implementation
@every_form
@pytest.mark.parametrize("num_pools", [1, 5, 100, 129, 512])
def test_any_number_of_pools(implementation, form, num_pools):
    """Not powers of two; more than there are; so few that what is kept overflows again and again."""
    case = select_case(form, (700, 300), ((0, 2_799), (1, 1_000), (0, 1_500)), num_pools=num_pools, page_size=512)
    assert decoded(selected(implementation, case)) == case.expected()


@every_implementation
@pytest.mark.parametrize("num_pools", [16, 130])
def test_scores_that_rise_pass_every_threshold(implementation, num_pools):
    case = select_case("serving", (600,), ((0, 2_399), (0, 2_000)), num_pools=num_pools, rising=True)
    assert decoded(selected(implementation, case)) == case.expected()


@every_implementation
@every_form
@pytest.mark.parametrize("world, interleave", [(2, 4), (3, 8), (4, 64)])
def test_each_rank_selects_of_its_own_pools(implementation, form, world, interleave):
    for rank in range(world):
        geometry = {"world": world, "interleave": interleave, "page_size": 256 * (1 + world % 2), "rank": rank}
        if geometry["page_size"] % interleave:
            continue
        case = select_case(form, (410, 77), ((0, 1_639), (0, 1_630), (1, 307), (1, 15)), **geometry)
        assert decoded(selected(implementation, case, gap=64)) == case.expected()


@every_implementation
@pytest.mark.parametrize("lists", [2, 3, 7])
def test_several_lists(implementation, lists):
    case = select_case("serving", (700, 90), ((0, 2_799), (1, 300), (0, 500)), lists=lists, num_pools=20)
    assert decoded(selected(implementation, case)) == case.expected()


@every_implementation
def test_many_rows_of_several_requests(implementation):
    """Rows that share a program: of one request, of two, padded ones between them."""
    rows = [(0, 599 - row) for row in range(41)] + [(1, row) for row in range(12)] + [(-1, 5)] * 3
    rows += [(2, 279 - 3 * row) for row in range(30)] + [(0, 77)]
    case = select_case("serving", (150, 3, 70), tuple(rows), heads=32)
    assert decoded(selected(implementation, case)) == case.expected()


@every_implementation
def test_a_row_does_not_depend_on_the_others(implementation):
    """Bit for bit, with values that are no whole numbers."""
    case = select_case("serving", (300, 60), tuple((row % 2, 200 + row) for row in range(9)))
    case = dataclasses.replace(case, weights=torch.rand(9, 16, generator=torch.Generator().manual_seed(3)))
    whole = selected(implementation, case)
    for row in range(9):
        one = dataclasses.replace(
            case,
            values=case.values[row : row + 1],
            weights=case.weights[row : row + 1],
            row_requests=case.row_requests[row : row + 1],
            positions=case.positions[row : row + 1],
        )
        assert torch.equal(selected(implementation, one)[:, 0], whole[:, row])


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_scores_do_not_depend_on_how_many_rows_there_are(form, heads):
    """Bit for bit, in every form of the kernel, with sums and products that are rounded; nor on lists."""
    generator = torch.Generator().manual_seed(heads)
    counts = (1, MANY_ROWS + 2, FULL_ROWS + 3)
    case = select_case(form, (150,), ((0, 600),) * counts[-1], heads=heads, num_pools=150)
    keys = [torch.randn(150, 128, generator=generator)]
    values = torch.randn(counts[-1], heads, 128, generator=generator)
    weights = torch.randn(counts[-1], heads, generator=generator)
    arguments = dataclasses.replace(case, keys=keys, values=values, weights=weights).args("cuda")
    op(*arguments)
    for rows in counts:
        q, of_rows, pools, table, requests, positions = arguments[:6]
        given = (q[:rows], of_rows[:rows], pools, table, requests[:rows], positions[:rows])
        for lists in (1, 2):
            some = torch_sparse_mla.c4_select(*given, num_pools=150, page_size=256, interleave=4, lists=lists)
            merged = some.transpose(0, 1).flatten(1).sort(1, descending=True).values[:, :150]
            assert torch.equal(merged, arguments[6][0, :rows]), (rows, lists)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form, order", [("serving", "rising"), ("serving", "shuffled"), ("serving", "tied"), ("fp32", "rising")]
)
@pytest.mark.parametrize("num_pools", [1, 16, 100, 512])
@pytest.mark.parametrize("copies", [1, 17, 265])
def test_any_order_of_scores_in_what_is_kept_again_and_again(form, order, num_pools, copies):
    """What is kept overflows several times: in rows by themselves, and in those that share a program."""
    pools, lists = 9_000, 1 + copies % 2
    case = orders_case(form, order, pools, num_pools, first=3, lists=lists)
    missing = range(64, 128)
    arguments = list(case.args("cuda"))
    arguments[3][0, 1] = -1
    for index in (0, 1, 4, 5):
        arguments[index] = arguments[index].repeat(copies, *(1,) * (arguments[index].dim() - 1))
    found = torch_sparse_mla.c4_select(*arguments[:6], num_pools=num_pools, page_size=256, interleave=4, lists=lists)
    assert decoded(found[:, :4].cpu()) == case.expected(missing)
    assert torch.equal(found, found[:, :4].repeat(1, copies, 1))


@every_implementation
def test_repeats_bit_for_bit(implementation):
    case = select_case("serving", (700,), tuple((0, 2_700 + row) for row in range(9)), num_pools=130)
    case = dataclasses.replace(case, weights=torch.rand(9, 16))
    assert torch.equal(selected(implementation, case), selected(implementation, case))


@every_implementation
def test_rows_of_no_request_and_positions_beyond_the_table(implementation):
    case = select_case(rows=((-1, 40), (3, 40), (0, -1), (0, -5), (2**31 - 1, 3), (1, 2**31 - 1)), pools=(64, 64, 1))
    case = dataclasses.replace(case, block_table=case.block_table[:, :1].contiguous())
    found = decoded(selected(implementation, case))[0]
    assert found[:5] == [[]] * 5
    assert [pool for _, pool in found[5]] == [
        pool for _, pool in sorted(((case.score(5, pool), pool) for pool in range(64)), key=lambda p: (-p[0], p[1]))
    ][:16]


@every_implementation
@pytest.mark.parametrize("page", [-1, 2**31 - 1, 10_000])
def test_pools_of_missing_pages_are_not_seen(implementation, page):
    case = select_case("serving", (200,), ((0, 799),), num_pools=200)
    arguments = case.args(device_of(implementation))
    arguments[3][0, 1] = page
    op(*arguments)
    found = {pool for _, pool in decoded(arguments[6].cpu())[0][0]}
    assert found == set(range(64)) | set(range(128, 192)) | set(range(192, 200))


@every_implementation
def test_stale_pools_behind_the_last_visible_one_are_not_read(implementation):
    """Poison in every unused place would score as NaN or as a huge number."""
    case = select_case("serving", (70,), ((0, 139),), num_pools=100)
    arguments = case.args(device_of(implementation))
    pools = arguments[2]
    for place in range(35, 64):
        write_pool(pools, int(case.block_table[0, 0]), place, torch.full((128,), float("nan")), 2.0**100)
    op(*arguments)
    assert decoded(arguments[6].cpu()) == case.expected()


@every_implementation
def test_a_key_that_is_no_number_scores_lowest(implementation):
    case = select_case("fp32", (6,), ((0, 23),))
    case.weights.copy_(case.weights.abs() + 0.25)
    arguments = case.args(device_of(implementation))
    write_pool(arguments[2], int(case.block_table[0, 0]), 2, torch.full((128,), float("nan")))
    op(*arguments)
    found = {pool: score for score, pool in decoded(arguments[6].cpu())[0][0]}
    assert sorted(found) == list(range(6)) and found.pop(2) == float("-inf")
    assert found == {pool: case.score(0, pool) for pool in (0, 1, 3, 4, 5)}


def test_the_kernels_maximum_keeps_what_is_no_number():
    """Of the interpreter every maximum does, of a GPU only the instruction that is asked for."""
    serving = next(form for form in triton_kernels_select.aot_configurations(90) if "serving-1x16" in form.name)
    ptx = compiled(serving, 90).asm["ptx"]
    maxima = re.findall(r"max\.\S*f32", ptx)
    assert maxima and set(maxima) == {"max.NaN.f32"}
    # And what follows rounds each product together with its sum, or compilers would choose some, in every form others.
    for register in re.findall(r"max\.NaN\.f32\s+(%r\d+)", ptx):
        users = re.findall(rf"(\S+)\s+%r\d+,.*{register}\b", ptx)
        assert users == ["fma.rn.f32"], users


@every_implementation
def test_writes_nothing_but_candidates_and_workspace(implementation):
    case = select_case()
    arguments = list(case.args(device_of(implementation)))
    rows = len(case.positions)
    longer = poisoned((2, rows, 16), torch.int64, device_of(implementation))
    scratch = poisoned((len(arguments[7]) + 64,), torch.uint8, device_of(implementation))
    arguments[6], arguments[7] = longer[:1], scratch[:-64]
    before = [tensor.clone() for tensor in arguments[:6]]
    op(*arguments)
    assert decoded(longer[:1].cpu()) == case.expected()
    assert torch.equal(longer[1].cpu(), poisoned((rows, 16), torch.int64))
    assert torch.equal(scratch[-64:].cpu(), poisoned((64,), torch.uint8))
    for tensor, saved in zip(arguments[:6], before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), saved.view(torch.uint8)) or tensor.dtype == torch.float32


@every_implementation
def test_no_rows(implementation):
    case = select_case(rows=())
    case = dataclasses.replace(case, values=torch.empty(0, 16, 128), weights=torch.empty(0, 16))
    assert selected(implementation, case).shape == (1, 0, 16)


def test_candidates_are_numbers_in_the_order_of_selection():
    scores = torch.tensor([float("inf"), 3.5, 3.5, 0.0, -0.0, -2.0, float("-inf"), float("nan")])
    pools = torch.tensor([9, 4, 5, 6, 7, 8, 1, 2])
    numbers = candidates_of(scores, pools)
    assert numbers.tolist() == sorted(numbers.tolist(), reverse=True)
    assert numbers[1] == encode(3.5, 4) and (numbers > ABSENT).all()
    assert torch.equal(pools_of(numbers), pools)
    assert scores_of(numbers)[:7].tolist() == scores[:7].tolist()
    assert candidates_of(torch.tensor([-0.0]), torch.tensor([3])) == candidates_of(
        torch.tensor([0.0]), torch.tensor([3])
    )
    absent = torch.tensor([ABSENT])
    assert pools_of(absent).item() == -1 and scores_of(absent).item() == float("-inf")
    assert pools_of(candidates_of(torch.tensor([1.0]), torch.tensor([2**31 - 1]))).item() == 2**31 - 1


def test_public_function_allocates(device):
    case = select_case()
    arguments = case.args(device)
    sizes = {"num_pools": 16, "page_size": 256, "interleave": 4}
    found = torch_sparse_mla.c4_select(*arguments[:6], **sizes)
    assert decoded(found.cpu()) == case.expected()
    given = torch_sparse_mla.c4_select(*arguments[:6], **sizes, candidates=arguments[6], workspace=arguments[7])
    assert given is arguments[6] and torch.equal(given, found)


@pytest.mark.parametrize(
    "options, argument",
    [
        ({"num_pools": 0}, "num_pools"),
        ({"num_pools": 4.0}, "num_pools"),
        ({"lists": 0}, "lists"),
        ({"lists": "1"}, "lists"),
        ({"num_pools": 8, "given": True}, "candidates"),
    ],
)
def test_public_function_refuses_sizes_that_do_not_match(options, argument):
    arguments = select_case().args()
    options = {"num_pools": 16, "page_size": 256} | options
    if options.pop("given", False):
        options["candidates"] = arguments[6]
    with expect_rejection(OP, argument, ""):
        torch_sparse_mla.c4_select(*arguments[:6], **options)


@pytest.mark.parametrize("function", ["quantise_index_queries", "exact_index_queries"])
def test_queries_that_do_not_fit_are_refused_by_the_function_asked(function):
    for q, weights, argument in ((torch.zeros(2, 16, 64), (2, 16), "q"), (torch.zeros(2, 16, 128), (2, 15), "weights")):
        with expect_rejection(function, argument, "shape" if argument == "weights" else "floating point"):
            getattr(torch_sparse_mla, function)(q, torch.zeros(weights))


@every_implementation
@pytest.mark.parametrize(
    "position, change, argument, allowed",
    [
        (0, lambda t: t.float(), "pools", "dtype float32"),
        (0, lambda t: t[:, :10], "q", "16 or 32 or 64 heads, 128"),
        (0, lambda t: t[:, :, :64], "q", "heads, 128"),
        (0, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), "q", "a contiguous tensor"),
        (1, lambda t: t.double(), "weights", "dtype float32"),
        (1, lambda t: t[:, :8], "weights", "rows, heads"),
        (2, lambda t: t[:, :-256], "pools", "shape [pages, 8448]"),
        (3, lambda t: t.long(), "block_table", "dtype int32"),
        (4, lambda t: t[:-1], "row_requests", "rows"),
        (5, lambda t: t.view(1, -1), "positions", "a shape of 1 dimension"),
        (6, lambda t: t[0], "candidates", "shape [lists, 6 rows, 1 to 512 pools]"),
        (6, lambda t: t.int(), "candidates", "dtype int64"),
        (6, lambda t: t[:0], "candidates", "at least one list"),
        (7, lambda t: t[:-16], "workspace", "c4_select_workspace_bytes"),
        (7, lambda t: torch.cat([t, t])[1:], "workspace", "storage aligned to 16 bytes"),
        (8, lambda n: 128, "page_size", "a multiple of 256 tokens"),
        (9, lambda n: 0, "interleave", "a multiple of 4"),
        (10, lambda n: 1, "rank", "0 <= rank < world"),
    ],
)
def test_rejects(implementation, position, change, argument, allowed):
    arguments = list(select_case().args(device_of(implementation)))
    arguments[position] = change(arguments[position])
    before = arguments[6].clone()
    with expect_rejection(OP, argument, allowed):
        (reference.c4_select if implementation == "reference" else op)(*arguments)
    assert torch.equal(arguments[6], before)


@every_implementation
@pytest.mark.parametrize("position, row, value", [(4, 2, 3), (4, 1, -2), (5, 0, 256 * 4), (5, 5, -2)])
def test_checked_mode_names_the_first_bad_row(implementation, position, row, value, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    arguments = list(select_case().args(device_of(implementation)))
    op(*arguments)
    arguments[position][row] = value
    name = {4: "row_requests", 5: "positions"}[position]
    with expect_rejection(OP, name, "") as error:
        op(*arguments)
    assert f"got {value} in row {row};" in str(error.value)


@every_form
def test_warmup_writes_nothing_into_the_pools(form, device):
    pools = select_case(form).args(device)[2]
    before = pools.clone()
    torch_sparse_mla.warmup_c4_indexer(
        pools, heads=32, num_pools=16, page_size=256, interleave=4, rank=1, world=2, keys_dtype=torch.float32
    )
    assert torch.equal(pools.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))


@every_form
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_warmup_compiles_every_form(form, heads, monkeypatch):
    """Whatever rows and lists come, with each kind of GPU."""
    warmed, select = [], api.c4_select
    monkeypatch.setattr(
        api, "c4_select", lambda q, *given, **sizes: warmed.append(len(q)) or select(q, *given, **sizes)
    )
    sizes = {"heads": heads, "num_pools": 16, "page_size": 256, "keys_dtype": torch.float32}
    torch_sparse_mla.warmup_c4_indexer(select_case(form).args()[2], **sizes)
    for capability in (80, 89, 90, 100, 120):
        forms = [select_form(FORMS[form], rows, 1, heads, 16, capability) for rows in warmed]
        for rows, lists in itertools.product((1, 2, 63, 64, 65, 500, 527, 528, 529, 1_055, 1_056, 9_000), (1, 2, 40)):
            assert select_form(FORMS[form], rows, lists, heads, 16, capability) in forms
            assert order_form(rows, 16) in [order_form(warm, 16) for warm in warmed]


def test_programs_of_eight_rows_fill_a_gpu():
    given = [(63, 1), (8, 132), (64, 1), (1_055, 1), (1_056, 1), (528, 2)]
    together = [select_form(torch.uint8, rows, lists, 32, 512, 90)["ROWS"] for rows, lists in given]
    assert together == [1, 1, 4, 4, 8, 8]


def test_workspace_is_bounded_by_rows_not_by_the_context():
    assert c4_select_workspace_bytes(4_096, 512) == 4_096 * 2_048 * 8
    assert c4_select_workspace_bytes(1, 16, 3) == 3 * 512 * 8


@every_form
def test_opcheck(form):
    torch.library.opcheck(op, select_case(form).args())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_results_equal_eager(backend):
    torch._dynamo.reset()
    case = select_case(num_pools=20)

    def function(*tensors):
        candidates = torch_sparse_mla.c4_select(*tensors, num_pools=20, page_size=256)
        return torch_sparse_mla.c4_merge_pools(candidates, tensors[5])

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    arguments = case.args()[:6]
    for found, expected in zip(compiled(*arguments), function(*arguments), strict=True):
        assert torch.equal(found, expected)
