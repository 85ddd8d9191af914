"""`read_ckv_records`: the numbers it reads, absent slots, what it refuses."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_sparse_mla import LAYOUTS, read_ckv_records, write_ckv_records

from .cases import (
    LAYOUT_NAMES,
    edge_tokens,
    model_records,
    model_values,
    paged_cache,
    random_tokens,
    rope_for,
    same_bits,
)

OP = torch.ops.torch_sparse_mla.read_ckv_records.default
PAGES, PAGE_SIZE = 3, 5
SLOTS = [3, 0, 14, -1, 7, 15, 8, 3]  # 15 lies beyond the cache
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random_cache(layout, generator, device, tail_bytes=0):
    """Every byte random, page tails included: all codes, scales of any sign and size, NaN."""
    cache, storage = paged_cache(layout, PAGES, PAGE_SIZE, tail_bytes)
    storage.copy_(torch.randint(0, 256, storage.shape, generator=generator, dtype=torch.uint8))
    storage = storage.to(device)
    return storage[:, : cache[0].numel()].unflatten(1, cache.shape[1:])


def expected_values(cache, slots, layout, dtype):
    out = torch.zeros(len(slots), LAYOUTS[layout].query_dim)
    for row, slot in enumerate(slots):
        if 0 <= slot < PAGES * PAGE_SIZE:
            out[row] = model_values(cache[slot // PAGE_SIZE, slot % PAGE_SIZE][None], layout)[0]
    return out.to(dtype)


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_matches_byte_model(layout, dtype, device, generator):
    cache = random_cache(layout, generator, device, tail_bytes=80)
    expected = expected_values(cache, SLOTS, layout, dtype)
    for slot_dtype in (torch.int32, torch.int64):
        out = torch.full((len(SLOTS), LAYOUTS[layout].query_dim), 7.0, dtype=dtype, device=device)
        returned = read_ckv_records(cache, torch.tensor(SLOTS, dtype=slot_dtype, device=device), layout, out)
        assert returned is out
        assert same_bits(out.cpu(), expected)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_reads_back_what_was_written(layout, device):
    latent, rope = edge_tokens()
    cache, _ = paged_cache(layout, len(latent), 1, device=device)
    slots = torch.arange(len(latent), device=device)
    write_ckv_records(latent.to(device), rope_for(layout, rope.to(device)), slots, cache, layout)
    values = read_ckv_records(cache, slots, layout, dtype=torch.float32)
    assert same_bits(values.cpu(), model_values(model_records(latent, rope, layout), layout))


def test_static_and_two_level_records_in_one_cache(device, generator):
    layout = "nvfp4_ds_mla_fp8rope"
    latent, rope = random_tokens(generator, 4, -1, 1)
    records = model_records(latent, rope, layout)
    records[::2, :288] = model_records(latent, rope, "nvfp4_ds_mla")[::2, :288]
    records[::2, 292:296] = 0
    values = read_ckv_records(
        records.view(2, 2, -1).to(device), torch.arange(4, device=device), layout, dtype=torch.float32
    )
    assert same_bits(values.cpu(), model_values(records, layout))
    assert values[:, :512].cpu().sub(latent).abs().amax() <= latent.abs().amax() / 4


def test_allocates_bf16_when_no_output_is_given(device):
    cache, _ = paged_cache("bf16_mla", 1, 1, device=device)
    out = read_ckv_records(cache, torch.tensor([0, -1], device=device), "bf16_mla")
    assert (out.dtype, out.shape, out.device.type) == (torch.bfloat16, (2, 576), device)
    assert (out[0].view(torch.int16) == 0xA5A5 - 2**16).all() and (out[1] == 0).all()


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_nothing_to_read(layout, device):
    cache, _ = paged_cache(layout, PAGES, PAGE_SIZE, device=device)
    assert read_ckv_records(cache, torch.empty(0, dtype=torch.int32, device=device), layout).numel() == 0
    far = torch.tensor([-1, 15, 2**31, 2**62, -(2**62)], device=device)
    assert (read_ckv_records(cache, far, layout) == 0).all()
    assert (read_ckv_records(cache[:0], far, layout) == 0).all()


@pytest.mark.parametrize("layout", ["nvfp4_mla_nope", "fp8_ds_mla"])
def test_offsets_beyond_two_gib(layout, device, generator):
    record_bytes = LAYOUTS[layout].record_bytes
    pages = 2**31 // (64 * record_bytes) + 2
    cache = torch.empty(pages, 64, record_bytes, dtype=torch.uint8, device=device)
    slots = [0, 2**31 // record_bytes, 2**31 // record_bytes + 1, pages * 64 - 1]
    records = model_records(*random_tokens(generator, 4, -1, 1), layout)
    for slot, record in zip(slots, records, strict=True):
        cache[slot // 64, slot % 64] = record.to(device)
    values = read_ckv_records(cache, torch.tensor(slots, device=device), layout, dtype=torch.float32)
    assert same_bits(values.cpu(), model_values(records, layout))


def test_float64_on_the_cpu_holds_exact_products(generator):
    records = model_records(*random_tokens(generator, 3, -2, 2), "fp8_ds_mla")
    values = read_ckv_records(records[None], torch.arange(3), "fp8_ds_mla", dtype=torch.float64)
    codes = records[:, :512].view(torch.float8_e4m3fn).double()
    scales = records[:, 512:528].contiguous().view(torch.float32).double().repeat_interleave(128, 1)
    assert torch.equal(values[:, :512], codes * scales)


def test_checked_mode_names_the_first_bad_slot(device, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    cache, _ = paged_cache("bf16_mla", PAGES, PAGE_SIZE, device=device)
    out = torch.full((3, 576), 7.0, device=device)
    with pytest.raises(ValueError, match=r"argument 'slots': got 15 in row 1; allowed: -1 or 0..14"):
        read_ckv_records(cache, torch.tensor([0, 15, -2], device=device), "bf16_mla", out)
    assert (out == 7).all()
    read_ckv_records(cache, torch.tensor([0, 14, -1], device=device), "bf16_mla", out)


def good_arguments(device: str = "cpu") -> dict:
    return {
        "cache": torch.zeros(2, 4, 656, dtype=torch.uint8, device=device),
        "slots": torch.tensor([0, 1], device=device),
        "out": torch.full((2, 576), 7.0, device=device),
        "layout": "fp8_ds_mla",
    }


BAD_ARGUMENTS = {
    "layout": ("layout", lambda a: a | {"layout": ""}, "one of bf16_mla"),
    "cache_dtype": ("cache", lambda a: a | {"cache": a["cache"].char()}, "uint8"),
    "cache_width": ("cache", lambda a: a | {"layout": "fp8_mla_nope"}, "528] for layout fp8_mla_nope"),
    "cache_records": ("cache", lambda a: a | {"cache": a["cache"][:, ::2]}, "strides [any, 656, 1]"),
    "slots_dtype": ("slots", lambda a: a | {"slots": a["slots"].float()}, "int32 or int64"),
    "slots_shape": ("slots", lambda a: a | {"slots": a["slots"][None]}, "[tokens]"),
    "slots_device": ("slots", lambda a: a | {"slots": a["slots"].to("meta")}, "device cpu, where 'cache' is"),
    "out_dtype": ("out", lambda a: a | {"out": torch.full((2, 576), 7)}, "bfloat16 or float16 or float32"),
    "out_shape": ("out", lambda a: a | {"out": torch.full((2, 512), 7.0)}, "[tokens, query_dim] = [2, 576]"),
    "out_stride": ("out", lambda a: a | {"out": torch.full((2, 600), 7.0)[:, :576]}, "contiguous"),
    "overlap": (
        "out",
        lambda a: a | {"out": a["cache"].flatten()[: 2 * 576 * 2].view(torch.bfloat16).view(2, 576)},
        "memory of its own",
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_rejects(case):
    argument, change, allowed = BAD_ARGUMENTS[case]
    arguments = change(good_arguments())
    before = arguments["out"].clone()
    with pytest.raises(ValueError) as raised:
        OP(*arguments.values())
    assert str(raised.value).startswith(f"torch_sparse_mla::read_ckv_records: argument '{argument}': got ")
    assert allowed in str(raised.value).split("allowed: ")[1]
    assert torch.equal(arguments["out"], before)


def test_the_public_function_rejects_what_it_cannot_size():
    cache = good_arguments()["cache"]
    with pytest.raises(ValueError, match="argument 'layout'"):
        read_ckv_records(cache, torch.tensor([0]), "fp8")
    for slots in (torch.tensor(0), torch.tensor([[0, 1]])):
        with pytest.raises(ValueError, match="argument 'slots'"):
            read_ckv_records(cache, slots, "fp8_ds_mla")


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_opcheck(layout, device):
    # Finite values: opcheck compares two runs, and NaN is not equal to itself.
    cache = model_records(*random_tokens(torch.Generator().manual_seed(0), 6, -1, 1), layout).view(2, 3, -1).to(device)
    out = torch.empty(3, LAYOUTS[layout].query_dim, device=device)
    torch.library.opcheck(OP, (cache, torch.tensor([1, -1, 4], device=device), out, layout))


@pytest.mark.filterwarnings("ignore:CUDA initialization")
def test_fake_cuda_tensors_get_the_same_checks():
    with FakeTensorMode():
        OP(*good_arguments("cuda").values())
        out = read_ckv_records(
            good_arguments("cuda")["cache"], torch.zeros(5, dtype=torch.int32, device="cuda"), "fp8_ds_mla"
        )
        assert (out.shape, out.device.type) == ((5, 576), "cuda")
        with pytest.raises(ValueError, match="argument 'out': got dtype float64"):
            OP(*(good_arguments("cuda") | {"out": torch.empty(2, 576, dtype=torch.float64, device="cuda")}).values())


def test_write_and_read_compile_into_one_graph(device, generator):
    """Without the declared mutation the write would be dropped, or moved behind the read."""

    def step(latent, rope, slots, cache):
        write_ckv_records(latent * 2, rope, slots, cache, "fp8_ds_mla")
        return read_ckv_records(cache, slots, "fp8_ds_mla", dtype=torch.float32) + 1

    latent, rope = (values.to(device) for values in random_tokens(generator, 4, -1, 1))
    slots = torch.tensor([0, 14, -1, 7], device=device)
    eager_cache, _ = paged_cache("fp8_ds_mla", PAGES, PAGE_SIZE, 16, device)
    compiled_cache, _ = paged_cache("fp8_ds_mla", PAGES, PAGE_SIZE, 16, device)
    expected = step(latent, rope, slots, eager_cache)
    values = torch.compile(step, fullgraph=True)(latent, rope, slots, compiled_cache)
    assert torch.equal(values, expected)
    assert torch.equal(compiled_cache, eager_cache)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_graph_replays_with_new_values_and_slots(layout, generator):
    cache = random_cache(layout, generator, "cuda")
    slots = torch.tensor([0, 1, -1, 2], device="cuda")
    out = torch.empty(4, LAYOUTS[layout].query_dim, dtype=torch.bfloat16, device="cuda")
    read_ckv_records(cache, slots, layout, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read_ckv_records(cache, slots, layout, out)
    for new_slots in ([5, 6, 7, 8], [-1, 14, 15, 9], [0, -1, -1, -1]):
        cache.copy_(random_cache(layout, generator, "cuda"))
        slots.copy_(torch.tensor(new_slots))
        out.fill_(7)
        graph.replay()
        assert same_bits(out.cpu(), expected_values(cache, new_slots, layout, torch.bfloat16))
