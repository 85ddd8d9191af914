"""`write_ckv_records`: the records it writes, what it leaves alone, what it refuses."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_sparse_mla import LAYOUTS, write_ckv_records

from .cases import (
    LAYOUT_NAMES,
    POISON,
    edge_tokens,
    model_records,
    paged_cache,
    random_tokens,
    rope_for,
)

OP = torch.ops.torch_sparse_mla.write_ckv_records.default
PAGES, PAGE_SIZE = 3, 5
SLOTS = [3, 0, 14, -1, 7, 15, 8, 2]  # 15 lies beyond the cache


def expected_cache(latent, rope, slots, layout, cache):
    """Token by token, in order: the last of several tokens with one slot wins."""
    cache = cache.cpu().clone()
    records = model_records(latent.cpu(), rope.cpu(), layout)
    for record, slot in zip(records, slots, strict=True):
        if 0 <= slot < cache.shape[0] * cache.shape[1]:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = record
    return cache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_matches_byte_model(layout, dtype, device, generator):
    latent, rope = (values.to(dtype).to(device) for values in random_tokens(generator, len(SLOTS), -4, 1))
    cache, _ = paged_cache(layout, PAGES, PAGE_SIZE, device=device)
    expected = expected_cache(latent, rope, SLOTS, layout, cache)
    for slot_dtype in (torch.int32, torch.int64):
        cache.fill_(POISON)
        write_ckv_records(
            latent, rope_for(layout, rope), torch.tensor(SLOTS, dtype=slot_dtype, device=device), cache, layout
        )
        assert torch.equal(cache.cpu(), expected)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_edge_values_match_byte_model(layout, device):
    latent, rope = (values.to(device) for values in edge_tokens())
    cache, _ = paged_cache(layout, len(latent), 1, device=device)
    slots = list(range(len(latent)))
    expected = expected_cache(latent, rope, slots, layout, cache)
    write_ckv_records(latent, rope_for(layout, rope), torch.tensor(slots, device=device), cache, layout)
    assert torch.equal(cache.cpu(), expected)


@pytest.mark.parametrize("tail_bytes", [16, 4096])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_page_tails_stay_untouched(layout, tail_bytes, device, generator):
    latent, rope = (values.to(device) for values in random_tokens(generator, 15, -4, 4))
    cache, storage = paged_cache(layout, PAGES, PAGE_SIZE, tail_bytes, device)
    slots = torch.randperm(15, generator=generator)
    expected = expected_cache(latent, rope, slots.tolist(), layout, cache)
    write_ckv_records(latent, rope_for(layout, rope), slots.to(device), cache, layout)
    assert torch.equal(cache.cpu(), expected)
    assert (storage[:, -tail_bytes:] == POISON).all()


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "nvfp4_ds_mla_fp8rope"])
def test_rows_may_be_slices_of_one_projection(layout, device, generator):
    latent, rope = random_tokens(generator, 4, -1, 1)
    projection = torch.full((4, 593), float("nan"))
    projection[:, 8:520], projection[:, 520:584] = latent, rope
    projection = projection.to(device)
    cache, _ = paged_cache(layout, 1, 4, device=device)
    slots = [2, 0, 1, 3]
    expected = expected_cache(latent, rope, slots, layout, cache)
    # A mixed pair of dtypes, and a RoPE part that is not aligned to 16 bytes.
    write_ckv_records(projection[:, 8:520], projection[:, 520:584], torch.tensor(slots, device=device), cache, layout)
    assert torch.equal(cache.cpu(), expected)
    write_ckv_records(latent.to(device), rope.bfloat16().to(device), torch.tensor(slots, device=device), cache, layout)
    assert torch.equal(cache.cpu(), expected_cache(latent, rope.bfloat16(), slots, layout, cache))


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_nothing_to_write(layout, device):
    cache, _ = paged_cache(layout, PAGES, PAGE_SIZE, device=device)
    empty = torch.empty(0, 512, device=device), torch.empty(0, 64, device=device)
    write_ckv_records(
        empty[0], rope_for(layout, empty[1]), torch.empty(0, dtype=torch.int32, device=device), cache, layout
    )
    latent, rope = torch.ones(3, 512, device=device), torch.ones(3, 64, device=device)
    skipped = torch.tensor([-1, PAGES * PAGE_SIZE, -(2**31)], dtype=torch.int32, device=device)
    write_ckv_records(latent, rope_for(layout, rope), skipped, cache, layout)
    far = torch.tensor([2**31, 2**62, -(2**62)], device=device)
    write_ckv_records(latent, rope_for(layout, rope), far, cache, layout)
    assert (cache == POISON).all()
    write_ckv_records(latent, rope_for(layout, rope), far, cache[:0], layout)


def test_of_two_tokens_with_one_slot_the_last_wins_on_the_cpu(generator):
    latent, rope = random_tokens(generator, 6, -1, 1)
    cache, _ = paged_cache("fp8_ds_mla", PAGES, PAGE_SIZE)
    slots = [4, 1, 4, 1, 9, 4]
    expected = expected_cache(latent, rope, slots, "fp8_ds_mla", cache)
    write_ckv_records(latent, rope, torch.tensor(slots), cache, "fp8_ds_mla")
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("layout", ["nvfp4_mla_nope", "fp8_ds_mla"])
def test_offsets_beyond_two_gib(layout, device, generator):
    """The storage is never touched as a whole: on the CPU only the pages written exist."""
    record_bytes = LAYOUTS[layout].record_bytes
    pages = 2**31 // (64 * record_bytes) + 2
    cache = torch.empty(pages, 64, record_bytes, dtype=torch.uint8, device=device)
    slots = [0, 2**31 // record_bytes, 2**31 // record_bytes + 1, pages * 64 - 1]
    latent, rope = random_tokens(generator, 4, -1, 1)
    write_ckv_records(
        latent.to(device), rope_for(layout, rope.to(device)), torch.tensor(slots, device=device), cache, layout
    )
    written = torch.stack([cache[slot // 64, slot % 64] for slot in slots])
    assert torch.equal(written.cpu(), model_records(latent, rope, layout))


@pytest.mark.gpu
def test_more_tokens_than_a_grid_axis_holds(generator):
    """Grid axes y and z end at 65,535."""
    tokens = 65_600
    latent = (
        torch.randn(1, 512, generator=generator).expand(tokens, 512).cuda()
        * torch.linspace(1, 2, tokens).cuda()[:, None]
    )
    cache, _ = paged_cache("nvfp4_mla_nope", tokens, 1, device="cuda")
    write_ckv_records(latent, None, torch.arange(tokens, device="cuda").flip(0), cache, "nvfp4_mla_nope")
    sample = [0, 1, 65_534, 65_535, 65_536, tokens - 1]
    assert torch.equal(
        cache.flip(0)[sample, 0].cpu(), model_records(latent[sample].cpu(), torch.zeros(6, 64), "nvfp4_mla_nope")
    )


@pytest.mark.parametrize("argument", ["latent", "rope"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_is_refused_on_the_cpu(argument, bad, generator):
    latent, rope = random_tokens(generator, 3, -1, 1)
    {"latent": latent, "rope": rope}[argument][1, 37] = bad
    cache, _ = paged_cache("fp8_ds_mla", PAGES, PAGE_SIZE)
    with pytest.raises(ValueError, match=rf"write_ckv_records: argument '{argument}': got a non-finite value in row 1"):
        write_ckv_records(latent, rope, torch.tensor([0, 1, 2]), cache, "fp8_ds_mla")
    assert (cache == POISON).all()
    write_ckv_records(latent, rope, torch.tensor([0, -1, 2]), cache, "fp8_ds_mla")
    assert (cache[0, 1] == POISON).all(), "padding may hold anything"


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_non_finite_spoils_no_other_record(layout, bad, generator, monkeypatch):
    latent, rope = random_tokens(generator, 3, -1, 1)
    clean, _ = paged_cache(layout, PAGES, PAGE_SIZE, device="cuda")
    cache = clean.clone()
    slots = torch.tensor([0, 1, 2], device="cuda")
    write_ckv_records(latent.cuda(), rope_for(layout, rope.cuda()), slots, clean, layout)
    latent[1, 37], rope[1, 5] = bad, bad
    write_ckv_records(latent.cuda(), rope_for(layout, rope.cuda()), slots, cache, layout)
    cache[0, 1] = clean[0, 1]
    assert torch.equal(cache, clean)
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    with pytest.raises(ValueError, match="argument 'latent': got a non-finite value in row 1"):
        write_ckv_records(latent.cuda(), rope_for(layout, rope.cuda()), slots, cache, layout)


@pytest.mark.parametrize(("slots", "row"), [([0, 15, 1], 1), ([-2, 0, 1], 0), ([3, -1, 99], 2)])
def test_checked_mode_names_the_first_bad_slot(slots, row, device, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    cache, _ = paged_cache("fp8_ds_mla", PAGES, PAGE_SIZE, device=device)
    tensors = torch.ones(3, 512, device=device), torch.ones(3, 64, device=device)
    with pytest.raises(ValueError, match=rf"argument 'slots': got {slots[row]} in row {row}; allowed: -1 or 0..14"):
        write_ckv_records(*tensors, torch.tensor(slots, device=device), cache, "fp8_ds_mla")
    assert (cache == POISON).all()
    write_ckv_records(*tensors, torch.tensor([0, -1, 14], device=device), cache, "fp8_ds_mla")


def test_an_unknown_checked_mode_raises(monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "yes")
    cache, _ = paged_cache("bf16_mla_nope", 1, 1)
    with pytest.raises(ValueError, match="TORCH_SPARSE_MLA_CHECK: got 'yes'; allowed: 0 or 1"):
        write_ckv_records(torch.ones(1, 512), None, torch.tensor([0]), cache, "bf16_mla_nope")


def good_arguments(device: str = "cpu") -> dict:
    return {
        "latent": torch.ones(2, 512, device=device),
        "rope": torch.ones(2, 64, device=device),
        "slots": torch.tensor([0, 1], device=device),
        "cache": torch.full((2, 4, 656), POISON, dtype=torch.uint8, device=device),
        "layout": "fp8_ds_mla",
    }


def misaligned_cache() -> torch.Tensor:
    return torch.full((2 * 4 * 656 + 8,), POISON, dtype=torch.uint8)[8:].view(2, 4, 656)


def cache_within(bytes_after: int) -> torch.Tensor:
    return paged_cache("fp8_ds_mla", 2, 4, bytes_after)[0]


BAD_ARGUMENTS = {
    "layout": ("layout", lambda a: a | {"layout": "fp8"}, "one of bf16_mla"),
    "latent_dtype": ("latent", lambda a: a | {"latent": a["latent"].double()}, "bfloat16 or float16 or float32"),
    "latent_width": ("latent", lambda a: a | {"latent": torch.ones(2, 511)}, "[tokens, 512]"),
    "latent_tokens": ("latent", lambda a: a | {"latent": torch.ones(3, 512)}, "[tokens, 512] = [2, 512]"),
    "latent_stride": ("latent", lambda a: a | {"latent": torch.ones(512, 2).t()}, "a last stride of 1"),
    "latent_device": ("latent", lambda a: a | {"latent": a["latent"].to("meta")}, "device cpu, where 'cache' is"),
    "rope_missing": ("rope", lambda a: a | {"rope": None}, "a [tokens, 64] tensor for layout fp8_ds_mla"),
    "rope_dtype": ("rope", lambda a: a | {"rope": a["rope"].int()}, "bfloat16 or float16 or float32"),
    "rope_width": ("rope", lambda a: a | {"rope": torch.ones(2, 63)}, "[tokens, 64]"),
    "rope_stride": ("rope", lambda a: a | {"rope": torch.ones(64, 2).t()}, "a last stride of 1"),
    "rope_unwanted": (
        "rope",
        lambda a: a | {"layout": "fp8_mla_nope", "cache": torch.full((1, 4, 528), POISON, dtype=torch.uint8)},
        "None for layout fp8_mla_nope",
    ),
    "slots_dtype": ("slots", lambda a: a | {"slots": a["slots"].short()}, "int32 or int64"),
    "slots_shape": ("slots", lambda a: a | {"slots": a["slots"][None]}, "[tokens]"),
    "slots_stride": ("slots", lambda a: a | {"slots": torch.zeros(4, dtype=torch.int64)[::2]}, "contiguous"),
    "cache_dtype": ("cache", lambda a: a | {"cache": a["cache"].char()}, "uint8"),
    "cache_shape": ("cache", lambda a: a | {"cache": a["cache"].flatten(0, 1)}, "[pages, page_size >= 1, 656]"),
    "cache_width": ("cache", lambda a: a | {"cache": a["cache"][..., :640]}, "656] for layout fp8_ds_mla"),
    "cache_records": ("cache", lambda a: a | {"cache": a["cache"][:, ::2]}, "strides [any, 656, 1]"),
    "cache_page_stride": ("cache", lambda a: a | {"cache": cache_within(8)}, "a multiple of 16 from 2624 up"),
    "cache_pages_alias": ("cache", lambda a: a | {"cache": a["cache"][:1].expand(2, -1, -1)}, "from 2624 up"),
    "cache_alignment": ("cache", lambda a: a | {"cache": misaligned_cache()}, "aligned to 16 bytes"),
    "overlap": (
        "cache",
        lambda a: a | {"latent": a["cache"].flatten()[: 2 * 512 * 2].view(torch.bfloat16).view(2, 512)},
        "memory of its own",
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_rejects(case):
    argument, change, allowed = BAD_ARGUMENTS[case]
    arguments = change(good_arguments())
    before = arguments["cache"].clone()
    with pytest.raises(ValueError) as raised:
        write_ckv_records(**arguments)
    assert str(raised.value).startswith(f"torch_sparse_mla::write_ckv_records: argument '{argument}': got ")
    assert allowed in str(raised.value).split("allowed: ")[1]
    assert torch.equal(arguments["cache"], before)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_opcheck(layout, device):
    cache, _ = paged_cache(layout, PAGES, PAGE_SIZE, 32, device)
    rope = rope_for(layout, torch.ones(3, 64, device=device))
    latent, slots = torch.ones(3, 512, device=device), torch.tensor([1, -1, 4], device=device)
    torch.library.opcheck(OP, (latent, rope, slots, cache, layout))


@pytest.mark.filterwarnings("ignore:CUDA initialization")
def test_fake_cuda_tensors_get_the_same_checks():
    with FakeTensorMode():
        OP(*good_arguments("cuda").values())
        with pytest.raises(ValueError, match="argument 'latent': got shape"):
            OP(*(good_arguments("cuda") | {"latent": torch.ones(2, 100, device="cuda")}).values())
        with pytest.raises(ValueError, match="argument 'slots': got device cpu; allowed: device cuda"):
            OP(*(good_arguments("cuda") | {"slots": torch.tensor([0, 1], device="cpu")}).values())


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_graph_replays_with_new_values_and_slots(layout, generator):
    latent, rope = (values.cuda() for values in random_tokens(generator, 4, -1, 1))
    slots = torch.tensor([0, 1, -1, 2], device="cuda")
    cache, storage = paged_cache(layout, PAGES, PAGE_SIZE, 48, "cuda")
    write_ckv_records(latent, rope_for(layout, rope), slots, cache, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_ckv_records(latent, rope_for(layout, rope), slots, cache, layout)
    for new_slots in ([5, 6, 7, 8], [-1, 14, 15, 9], [0, -1, -1, -1]):
        new_latent, new_rope = random_tokens(generator, 4, -2, 2)
        latent.copy_(new_latent), rope.copy_(new_rope), slots.copy_(torch.tensor(new_slots))
        cache.fill_(POISON)
        expected = expected_cache(latent, rope, new_slots, layout, cache)
        graph.replay()
        assert torch.equal(cache.cpu(), expected)
        assert (storage[:, -48:] == POISON).all()


@pytest.mark.multigpu
def test_launches_on_the_tensors_device(generator):
    latent, rope = random_tokens(generator, 4, -1, 1)
    cache, _ = paged_cache("fp8_ds_mla", PAGES, PAGE_SIZE, device="cuda:1")
    slots = [0, 5, 14, 3]
    expected = expected_cache(latent, rope, slots, "fp8_ds_mla", cache)
    assert torch.cuda.current_device() == 0
    write_ckv_records(latent.to("cuda:1"), rope.to("cuda:1"), torch.tensor(slots, device="cuda:1"), cache, "fp8_ds_mla")
    assert torch.equal(cache.cpu(), expected)
    assert torch.cuda.current_device() == 0


def test_a_token_beyond_the_cache_may_hold_anything():
    """It is not written, so its values are nobody's concern."""
    cache = torch.full((2, 4, 528), 0xA5, dtype=torch.uint8)
    before = cache.clone()
    latent = torch.full((2, 512), torch.nan)
    write_ckv_records(latent, None, torch.tensor([-1, 8]), cache, "fp8_mla_nope")
    assert torch.equal(cache, before)
