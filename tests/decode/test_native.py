"""The C++ form of `sparse_ckv_decode`: it equals the reference in every respect but speed.

These tests fail where the native library is not built: `make test` builds it.
"""

import ctypes
import dataclasses
import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from torch_sparse_mla import LAYOUTS, dequantise_records, explain, sparse_ckv_decode_workspace_bytes
from torch_sparse_mla._ops import native_error, native_library
from torch_sparse_mla.decode.contract import MAX_HEADS, MAX_TOPK, max_wide_splits, num_splits

from .cases import DecodeCase, assert_accurate, assert_close_to, assert_same_bits, call, decode, make_case, with_outputs
from .emulated_sm90 import BY_MODEL, NARROW, WIDE
from .rejections import assert_untouched, snapshot
from .test_sparse_ckv_decode_errors import WRONG_FORM, WRONG_MEMORY, flatten, small_case

MEASURED = Path(__file__).parents[2] / "profiling" / "results" / "sparse_ckv_decode-nvidia-h200.json"
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(autouse=True)
def _native_is_built():
    assert native_library, f"the native library is not in use: {native_error}"


@pytest.fixture(autouse=True)
def _threads_come_back():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def library() -> ctypes.CDLL:
    return ctypes.CDLL(native_library)


def native(case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor]:
    return decode("op-cpu", case)


def assert_matches_reference(case: DecodeCase, tolerance: float = 1e-5) -> None:
    out, lse = native(case)
    expected_out, expected_lse = decode("reference", with_outputs(case, case.out.dtype))
    assert_close_to(out, lse, expected_out.double().numpy(), expected_lse.double().numpy(), tolerance)


def holes(indices: torch.Tensor) -> None:
    """Absent, out-of-range and repeated slots at odd places."""
    indices[:, ::7] = -1
    indices[:, 3::11] = torch.iinfo(torch.int32).max
    indices[:, 5::13] = indices[:, :1].clone()
    indices[0, 1::2] = indices[0, :1]


def instruction_sets() -> list[str]:
    """Those that this CPU has, as the operator's own message lists them."""
    case = make_case(rows=1, heads=1, topk=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SPARSE_MLA_CPU_ISA", "none-such")
        with pytest.raises(
            ValueError, match=r"TORCH_SPARSE_MLA_CPU_ISA: got 'none-such'; allowed on this CPU: baseline"
        ) as error:
            native(case)
    return str(error.value).rsplit(": ", 1)[1].split(" or ")


def test_the_native_kernel_is_the_one_that_runs():
    assert explain("sparse_ckv_decode")["kernel"] == "native C++"


@every_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_matches_reference(layout, dtype):
    out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    case = make_case(
        rows=4, heads=5, topk=300, layout=layout, dtype=dtype, out_dtype=out_dtype, lengths=[300, 0, 77, 9000],
        sink=[0.0, -1.0, 3.0, float("-inf"), 60.0], edit_indices=holes,
    )  # fmt: skip
    assert_matches_reference(case, 1e-12 if dtype == torch.float64 else 1e-5)
    if dtype == torch.float64:
        assert_accurate(case, *native(case), 1e-12)


@pytest.mark.parametrize("heads", [1, 3, 4, 16, 128])
@pytest.mark.parametrize("topk", [1, 31, 256, 257])
def test_matches_reference_at_tile_edges(heads, topk):
    assert_matches_reference(make_case(rows=2, heads=heads, topk=topk, out_dtype=torch.float32))


@every_layout
def test_matches_reference_on_every_instruction_set(layout, monkeypatch):
    case = make_case(rows=2, heads=5, topk=300, layout=layout, out_dtype=torch.float32, edit_indices=holes)
    for name in instruction_sets():
        monkeypatch.setenv("TORCH_SPARSE_MLA_CPU_ISA", name)
        assert_matches_reference(with_outputs(case, torch.float32))


def test_row_strides_are_free():
    case = make_case(rows=3, heads=2, topk=40, out_dtype=torch.float32)
    expected = native(case)
    wide_q = torch.full((3, 2 * 576 + 32), torch.nan, dtype=case.q.dtype)
    wide_q[:, : 2 * 576] = case.q.flatten(1)
    wide_indices = torch.full((3, 51), 5, dtype=torch.int32)
    wide_indices[:, :40] = case.indices
    q = wide_q[:, : 2 * 576].unflatten(1, (2, 576))
    strided = dataclasses.replace(with_outputs(case, torch.float32), q=q, indices=wide_indices[:, :40])
    assert_same_bits(native(strided), expected)


def single_records(records: torch.Tensor, layout: str, out_dtype: torch.dtype) -> DecodeCase:
    """One row for each record, which selects that record alone: `out` is the record's latent, rounded once."""
    count = len(records)
    case = make_case(rows=count, heads=1, topk=1, layout=layout, out_dtype=out_dtype)
    indices = torch.arange(count, dtype=torch.int32).unsqueeze(1)
    q = torch.zeros_like(case.q)
    return dataclasses.replace(case, q=q, cache=records.reshape(1, count, -1).contiguous(), indices=indices)


@every_layout
def test_every_code_is_decoded_exactly(layout):
    """All bytes (all pairs of bytes for bf16) pass through the codes' place, under uneven scales."""
    generator = torch.Generator().manual_seed(1)
    count = 128 if LAYOUTS[layout].latent == "bf16" else 8
    records = torch.zeros(count, LAYOUTS[layout].record_bytes, dtype=torch.uint8)
    if LAYOUTS[layout].latent == "bf16":
        patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
        records[:, :1024] = patterns.view(torch.uint8).reshape(count, 1024)
    elif LAYOUTS[layout].latent == "e4m3":
        records[:, :512] = torch.arange(256, dtype=torch.uint8).repeat(2)
        records[:, 512:528] = (torch.rand(count, 4, generator=generator) + 0.1).view(torch.uint8)
    else:
        records[:, :256] = torch.arange(256, dtype=torch.uint8)
        records[:, 256:288] = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
        if LAYOUTS[layout].token_scale_offset:
            records[::2, 292:296] = torch.tensor([0.37]).view(torch.uint8)
    out, _ = native(single_records(records, layout, torch.float32))
    expected, _ = dequantise_records(records, layout)
    # A zero query times an infinite or NaN key is a NaN score: such a record's row is NaN, as in the reference.
    finite = expected.isfinite().all(-1)
    torch.testing.assert_close(out[finite, 0], expected[finite], rtol=0, atol=0)
    assert out[~finite].isnan().all()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_as_pytorch_does(out_dtype, monkeypatch):
    """Ties, subnormals, overflow and signed zeros, on every instruction set."""
    generator = torch.Generator().manual_seed(2)
    records = torch.randint(0, 256, (256, 528), generator=generator, dtype=torch.uint8)
    records[:, :512] &= 0xF7  # no NaN codes
    scales = torch.exp2(torch.randint(-40, 20, (256, 4), generator=generator).float())
    scales[::2] *= torch.rand(128, 4, generator=generator) + 0.5
    records[:, 512:] = scales.view(torch.uint8)
    for name in instruction_sets():
        monkeypatch.setenv("TORCH_SPARSE_MLA_CPU_ISA", name)
        exact, _ = native(single_records(records, "fp8_mla_nope", torch.float32))
        rounded, _ = native(single_records(records, "fp8_mla_nope", out_dtype))
        assert torch.equal(rounded.view(torch.int16), exact.to(out_dtype).view(torch.int16))


def test_nan_in_a_selected_record_shows_in_its_row_alone():
    case = make_case(rows=2, heads=2, topk=40, out_dtype=torch.float32)
    slot = min(set(case.indices[0].tolist()) - set(case.indices[1].tolist()))
    case.cache[slot // 64, slot % 64, 0] = 0x7F
    out, lse = native(case)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


@pytest.mark.parametrize("heads, topk", [(16, 1100), (3, 700)])
def test_bits_depend_neither_on_threads_nor_on_rows(heads, topk):
    lengths = [topk, 0, 600, 257, topk]
    case = make_case(rows=5, heads=heads, topk=topk, lengths=lengths, edit_indices=holes, seed=3)
    torch.set_num_threads(1)
    expected = native(case)
    for threads, rows in itertools.product([1, 2, 3, 4], [[0, 1, 2, 3, 4], [4, 2], [0], [1, 3, 0]]):
        torch.set_num_threads(threads)
        some = native(case.with_rows(rows))
        assert_same_bits(some, (expected[0][rows], expected[1][rows]))


def test_serves_several_python_threads_at_once():
    torch.set_num_threads(2)
    cases = [make_case(rows=3, heads=16, topk=600, seed=seed) for seed in range(4)]
    expected = [native(case) for case in cases]
    results: list[list] = [[] for _ in cases]

    def work(position: int) -> None:
        for _ in range(10):
            results[position].append(native(cases[position]))

    workers = [threading.Thread(target=work, args=(position,)) for position in range(len(cases))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for wanted, given in zip(expected, results, strict=True):
        assert len(given) == 10
        for result in given:
            assert_same_bits(result, wanted)


FORK = """
import os, torch, torch_sparse_mla
torch.set_num_threads(2)
q = torch.randn(3, 16, 576)
cache = torch_sparse_mla.quantise_records(torch.randn(1, 64, 512), torch.randn(1, 64, 64), "fp8_ds_mla")
indices = torch.randint(0, 64, (3, 1024), dtype=torch.int32)
decode = lambda: torch_sparse_mla.sparse_ckv_decode(q, cache, indices, softmax_scale=0.05, layout="fp8_ds_mla")[0]
before = decode()
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(decode(), before) else 1)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_works_in_a_forked_child():
    """The parent's worker threads do not exist in the child: waiting for them would hang."""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "child 0", result.stderr


@pytest.mark.parametrize("argument, change, allowed", flatten(WRONG_FORM) + flatten(WRONG_MEMORY))
def test_rejects_in_the_words_of_the_reference(argument, change, allowed):
    case = small_case()
    case = dataclasses.replace(case, **change(case))
    before = snapshot(case)
    messages = []
    for implementation in ("reference", "op-cpu"):
        with pytest.raises(ValueError) as error:
            call(implementation, "sparse_ckv_decode", case.args())
        messages.append(str(error.value))
    assert messages[1] == messages[0]
    assert f"argument '{argument}'" in messages[1] and allowed in messages[1]
    assert_untouched(case, before)


@pytest.mark.parametrize(
    "edit, value",
    [
        (lambda case: case.lengths.__setitem__(1, 201), "201 in row 1"),
        (lambda case: case.indices.__setitem__((1, 5), -2), "-2 in row 1, column 5"),
        (lambda case: case.indices.__setitem__((0, 199), 2**31 - 1), "2147483647 in row 0, column 199"),
    ],
    ids=["length", "negative", "beyond-the-cache"],
)
def test_checked_mode_names_the_first_bad_row(edit, value, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    case = small_case()
    call("op-cpu", "sparse_ckv_decode", case.args())
    edit(case)
    case = with_outputs(case, case.out.dtype)
    before = snapshot(case)
    messages = []
    for implementation in ("reference", "op-cpu"):
        with pytest.raises(ValueError, match=value) as error:
            call(implementation, "sparse_ckv_decode", case.args())
        messages.append(str(error.value))
    assert messages[1] == messages[0]
    assert_untouched(case, before)


def test_checked_mode_ignores_columns_beyond_the_length(monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    case = small_case()
    case.indices[1, 7:] = -77
    call("op-cpu", "sparse_ckv_decode", case.args())
    assert case.out.isfinite().all()


@pytest.mark.parametrize("value", ["", "2", "true"])
def test_checked_mode_is_strict(value, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", value)
    case = small_case()
    before = snapshot(case)
    with pytest.raises(ValueError, match=f"TORCH_SPARSE_MLA_CHECK: got '{value}'; allowed: 0 or 1"):
        call("op-cpu", "sparse_ckv_decode", case.args())
    assert_untouched(case, before)


def test_layout_constants_equal_the_python_table(library):
    text = ctypes.create_string_buffer(256)
    lines = []
    while library.torch_sparse_mla_record_layout(len(lines), text, ctypes.c_size_t(len(text))):
        lines.append(text.value.decode())
    fields = (
        "name", "record_bytes", "query_dim", "latent", "group_size", "scale_offset", "token_scale_offset", "rope",
        "rope_offset", "rope_scale_offset",
    )  # fmt: skip
    expected = []
    for layout in LAYOUTS.values():
        values = (getattr(layout, field) for field in fields)
        expected.append(" ".join("none" if value is None else str(value) for value in values))
    assert lines == expected


def test_workspace_bytes_equal_the_python_function(library):
    size = library.torch_sparse_mla_decode_workspace_bytes
    size.argtypes, size.restype = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_bool), ctypes.c_int64
    rows = [0, 1, 2, 3, 7, 16, 33, 132, 133, 1000, 70_000]
    heads = [0, 1, 8, 15, 16, 17, 24, 32, 33, 48, 64, 65, 100, MAX_HEADS]
    topks = [0, 1, 63, 64, 65, 192, 255, 256, 257, 640, 2048, 2051, MAX_TOPK]
    for sizes in itertools.product(rows, heads, topks, [False, True]):
        assert size(*sizes) == sparse_ckv_decode_workspace_bytes(*sizes), sizes


def test_the_sm90_kernels_fit_the_workspace(sm90_plan):
    """They make at most as many parts as the workspace is sized for, and at least one."""
    rows = [1, 2, 3, 5, 7, 8, 16, 33, 70, 100, 132, 133, 264, 265, 1000, 70_000]
    part_bytes = 512 * 2 + 4 * 4 + 4  # of one head: fp16 latents, a unit for each 128, an lse
    for sizes in itertools.product(rows, [1, 16, 17, 32, 64, MAX_HEADS], [1, 64, 65, 2048, 2051, MAX_TOPK]):
        size = sparse_ckv_decode_workspace_bytes(*sizes)
        widest = WIDE if sizes[1] > 32 else NARROW
        narrow, wide = (sm90_plan(*sizes, form=form) for form in (NARROW, WIDE))
        assert narrow[0] == NARROW and 1 <= narrow[1] <= num_splits(*sizes, False), sizes
        assert wide[0] == widest and wide[1] >= 1, sizes
        assert wide[1] == 1 or wide[1] <= size / (sizes[0] * sizes[1] * part_bytes), sizes
        assert widest == NARROW or wide[1] <= max_wide_splits(*sizes), sizes
        assert sm90_plan(*sizes) in (narrow, wide), sizes
        # However many rows there are.
        for form, expected in ((BY_MODEL, NARROW), (NARROW, NARROW), (WIDE, widest)):
            assert sm90_plan(*sizes, invariant=True, form=form) == (expected, num_splits(*sizes, True)), sizes


def test_the_sm90_kernels_take_the_parts_of_fewest_clocks(sm90_plan):
    """Of all counts of parts, as the model in workspace.h has it, tried one by one."""

    def clocks(rows, heads, topk, splits, wide):
        head_tile, tokens, at_once, of_tile, of_wave, of_part = (
            (64, 48, 1, 4040, 18500, 60) if wide else (16, 32, 2, 1350, 7000, 45)
        )
        parts, tiles = rows * -(-heads // head_tile) * splits, -(-topk // tokens)
        rounds = -(-tiles // (splits * at_once))
        merge = 2600 + of_part * parts if splits > 1 else 0
        return -(-parts // 132) * (rounds * at_once * of_tile + of_wave) + merge

    for sizes in itertools.product([1, 2, 3, 8, 30, 70, 200], [1, 16, 33, 64, MAX_HEADS], [1, 100, 512, 2051, 9000]):
        for form, limit in ((NARROW, num_splits(*sizes, False)), (WIDE, max_wide_splits(*sizes))):
            wide = form == WIDE and sizes[1] > 32
            if form == WIDE and not wide:
                continue
            best = min(range(1, limit + 1), key=lambda splits: clocks(*sizes, splits, wide))
            assert sm90_plan(*sizes, form=form)[1] == best, (sizes, form)


def test_the_form_of_the_sm90_kernels_is_the_one_that_was_measured_as_faster(sm90_plan):
    """Of the committed results: the other form is faster by 5 % at most."""
    times = {}
    for case in json.loads(MEASURED.read_text())["cases"]:
        form = {"native-cuda-narrow": NARROW, "native-cuda-wide": WIDE}.get(case["impl"])
        if form is not None and case["mode"] == "graph" and case["rows_per_request"] == 1:
            sizes = tuple(case[key] for key in ("rows", "heads", "topk", "layout"))
            times.setdefault(sizes, {})[form] = case["us"]
    assert len(times) > 20
    for sizes, measured in times.items():
        assert measured[sm90_plan(*sizes)[0]] <= 1.05 * min(measured[NARROW], measured[WIDE]), (sizes, measured)


def test_cuda_stream_is_an_error_without_cuda_and_never_stream_zero(library):
    """With a CUDA build of PyTorch the stream is the one that PyTorch calls current."""
    stream, error = ctypes.c_void_p(), ctypes.create_string_buffer(256)
    found = library.torch_sparse_mla_current_cuda_stream(0, ctypes.byref(stream), error, ctypes.c_size_t(len(error)))
    if torch.cuda.is_available():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            assert library.torch_sparse_mla_current_cuda_stream(0, ctypes.byref(stream), error, ctypes.c_size_t(256))
        assert stream.value == side.cuda_stream
    elif torch.version.cuda is None:
        assert not found
        assert "libtorch_cuda.so is not loaded in this process; install a CUDA build" in error.value.decode()


def test_uses_nothing_but_the_stable_abi():
    """Then one build loads in every PyTorch from 2.11 on, with CUDA or without, under every Python."""
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", native_library], capture_output=True, text=True, check=True
    )
    symbols = [line.split()[-1].partition("@") for line in listing.stdout.splitlines()]
    unversioned = [name for name, _, version in symbols if not version]
    weak = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}
    foreign = [name for name in unversioned if name not in weak and not name.startswith(("aoti_torch_", "torch_"))]
    assert not foreign
    assert "torch_library_impl" in unversioned


def timed(implementation: str, case: DecodeCase) -> float:
    start = time.perf_counter()
    call(implementation, "sparse_ckv_decode", case.args())
    return time.perf_counter() - start


def test_is_at_least_twice_as_fast_as_the_reference():
    """Measured: 5 to 11 times on one idle core. The two take turns, so that other load slows both."""
    torch.set_num_threads(2)
    case = make_case(rows=8, heads=16, topk=2048)
    times: dict[str, list[float]] = {"op-cpu": [], "reference": []}
    for _ in range(3):
        for name, taken in times.items():
            taken.append(timed(name, case))
    assert 2 * np.median(times["op-cpu"]) <= np.median(times["reference"]), times


def test_call_overhead_is_at_most_thrice_that_of_a_pytorch_operator():
    """A call without rows: dispatch and every check, no kernel. Measured: 1.7 times an addmm (3.1 us, idle core).

    The two take turns and the least of many counts, so that a slower machine or other load moves both.
    """
    case = make_case(rows=1, heads=1, topk=1).with_rows([])
    op, args, calls = torch.ops.torch_sparse_mla.sparse_ckv_decode, case.args(), 50
    empty = torch.empty(0, 0)
    functions = {"decode": lambda: op(*args), "addmm": lambda: torch.ops.aten.addmm(empty, empty, empty)}
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(400):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best[name] = min(best[name], (time.perf_counter() - start) / calls)
    assert best["decode"] <= 3 * best["addmm"], best
