"""What the decode operators refuse: each argument wrong in each way, with nothing written."""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_sparse_mla
from torch_sparse_mla import sparse_ckv_decode_workspace_bytes

from .cases import DecodeCase, call, device_of, every_implementation, make_case, move
from .rejections import assert_untouched, expect_rejection, snapshot

# Written out: the contract's limits are public, so a changed constant must fail here.
MAX_TOPK = 16_384

Change = Callable[[DecodeCase], dict[str, object]]


def small_case() -> DecodeCase:
    """A fresh copy of one valid case."""
    return _valid_case().to("cpu")


@functools.cache
def _valid_case() -> DecodeCase:
    return make_case(rows=2, heads=3, topk=200, lengths=[200, 7], sink=[0.1, 0.2, 0.3])


def strided_cache(case: DecodeCase, page_stride: int, record_stride: int = 656, offset: int = 0) -> torch.Tensor:
    pages = case.cache.shape[0]
    storage = torch.full((offset + pages * max(page_stride, 64 * record_stride),), 0xFF, dtype=torch.uint8)
    return storage[offset:].as_strided((pages, 64, 656), (page_stride, record_stride, 1))


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a last stride of 2."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def apart(parts: torch.Tensor, stride: int) -> torch.Tensor:
    """The same values, each part `stride` elements from the one before."""
    flat = torch.full((len(parts), stride), torch.nan, dtype=parts.dtype, device=parts.device)
    flat[:, : parts[0].numel()] = parts.flatten(1)
    return flat[:, : parts[0].numel()].unflatten(1, parts.shape[1:])


def shared(case: DecodeCase, written: str, other: str) -> dict[str, object]:
    """`written` and `other` in one storage, overlapping by all but the first 16 bytes of the one."""
    storage = torch.zeros(1 << 20, dtype=torch.uint8)
    changed = {}
    for name, begin in ((written, 0), (other, 16)):
        tensor = getattr(case, name)
        size = tensor.numel() * tensor.element_size()
        changed[name] = storage[begin : begin + size].view(tensor.dtype).view(tensor.shape)
    return changed


# argument -> list of (what is wrong, change, what the message says is allowed). These need shapes and strides alone.
WRONG_FORM: dict[str, list[tuple[str, Change, str]]] = {
    "layout": [
        ("unknown", lambda case: {"layout": "fp9_mla"}, "one of bf16_mla, bf16_mla_nope, fp8_ds_mla"),
        ("empty", lambda case: {"layout": ""}, "one of bf16_mla"),
    ],
    "cache": [
        ("int8", lambda case: {"cache": case.cache.view(torch.int8)}, "dtype uint8"),
        ("2d", lambda case: {"cache": case.cache[0]}, "shape [pages, page_size >= 1, 656] for layout fp8_ds_mla"),
        ("record-width", lambda case: {"cache": case.cache[:, :, :640]}, "656] for layout fp8_ds_mla"),
        ("other-layout", lambda case: {"layout": "nvfp4_ds_mla"}, "432] for layout nvfp4_ds_mla"),
        ("empty-pages", lambda case: {"cache": case.cache[:, :0]}, "page_size >= 1"),
        ("record-stride", lambda case: {"cache": strided_cache(case, 64 * 672, 672)}, "strides [any, 656, 1]"),
        ("byte-stride", lambda case: {"cache": gapped(case.cache)}, "strides [any, 656, 1]"),
        ("page-stride-8", lambda case: {"cache": strided_cache(case, 64 * 656 + 8)}, "a multiple of 16 from 41984"),
        ("page-overlap", lambda case: {"cache": strided_cache(case, 63 * 656)}, "a multiple of 16 from 41984"),
    ],
    "q": [
        ("int32", lambda case: {"q": case.q.to(torch.int32)}, "dtype bfloat16 or float16 or float32"),
        ("2d", lambda case: {"q": case.q[0]}, "shape [rows, 1..128 heads, 576] for layout fp8_ds_mla"),
        ("nope-width", lambda case: {"q": case.q[:, :, :512]}, "576] for layout fp8_ds_mla"),
        ("no-heads", lambda case: {"q": case.q[:, :0]}, "1..128 heads"),
        ("129-heads", lambda case: {"q": case.q[:, :1].expand(-1, 129, -1).contiguous()}, "1..128 heads"),
        ("head-stride", lambda case: {"q": case.q.repeat(1, 2, 1)[:, ::2]}, "strides [any, 576, 1]"),
        ("last-stride", lambda case: {"q": gapped(case.q)}, "strides [any, 576, 1]"),
    ],
    "indices": [
        ("int64", lambda case: {"indices": case.indices.long()}, "dtype int32"),
        ("1d", lambda case: {"indices": case.indices[0]}, f"shape [rows, 1..{MAX_TOPK}] with rows = 2"),
        ("rows", lambda case: {"indices": case.indices[:1]}, "with rows = 2"),
        ("no-columns", lambda case: {"indices": case.indices[:, :0]}, f"1..{MAX_TOPK}"),
        (
            "too-many-columns",
            lambda case: {"indices": torch.zeros(2, MAX_TOPK + 1, dtype=torch.int32, device=case.q.device)},
            f"1..{MAX_TOPK}",
        ),
        ("last-stride", lambda case: {"indices": gapped(case.indices)}, "a last stride of 1"),
    ],
    "lengths": [
        ("int64", lambda case: {"lengths": case.lengths.long()}, "dtype int32"),
        ("rows", lambda case: {"lengths": case.lengths[:1]}, "shape [rows] = [2]"),
        ("2d", lambda case: {"lengths": case.lengths.unsqueeze(1)}, "shape [rows] = [2]"),
        ("stride", lambda case: {"lengths": gapped(case.lengths)}, "a contiguous tensor"),
    ],
    "sink": [
        ("bfloat16", lambda case: {"sink": case.sink.bfloat16()}, "dtype float32"),
        ("heads", lambda case: {"sink": case.sink[:2]}, "shape [heads] = [3]"),
        ("2d", lambda case: {"sink": case.sink.unsqueeze(0)}, "shape [heads] = [3]"),
        ("stride", lambda case: {"sink": gapped(case.sink)}, "a contiguous tensor"),
    ],
    "out": [
        ("float64", lambda case: {"out": case.out.double()}, "dtype bfloat16 or float16 or float32"),
        ("uint8", lambda case: {"out": case.out.to(torch.uint8)}, "dtype bfloat16"),
        ("width", lambda case: {"out": case.out[:, :, :511].contiguous()}, "shape [rows, heads, 512] = [2, 3, 512]"),
        ("heads", lambda case: {"out": case.out[:, :2].contiguous()}, "[2, 3, 512]"),
        ("rows", lambda case: {"out": case.out[:1]}, "[2, 3, 512]"),
        ("slice", lambda case: {"out": case.out.repeat(1, 1, 2)[:, :, :512]}, "a contiguous tensor"),
    ],
    "lse": [
        ("bfloat16", lambda case: {"lse": case.lse.bfloat16()}, "dtype float32"),
        ("float64", lambda case: {"lse": case.lse.double()}, "dtype float32"),
        ("heads-first", lambda case: {"lse": case.lse.T.contiguous()}, "shape [rows, heads] = [2, 3]"),
        ("transposed", lambda case: {"lse": case.lse.T.contiguous().T}, "a contiguous tensor"),
    ],
    "workspace": [
        ("float32", lambda case: {"workspace": case.workspace.view(torch.float32)}, "dtype uint8"),
        ("stride", lambda case: {"workspace": gapped(case.workspace)}, "a contiguous tensor"),
    ],
}

WRONG_MEMORY: dict[str, list[tuple[str, Change, str]]] = {
    "cache": [
        (
            "misaligned",
            lambda case: {"cache": strided_cache(case, 64 * 656, offset=8)},
            "storage aligned to 16 bytes",
        ),
    ],
    "workspace": [
        ("one-byte-short", lambda case: {"workspace": case.workspace[:-1]}, "sparse_ckv_decode_workspace_bytes = "),
        ("none", lambda case: {"workspace": case.workspace[:0]}, "sparse_ckv_decode_workspace_bytes = "),
        ("misaligned", lambda case: {"workspace": case.workspace.repeat(2)[4:]}, "storage aligned to 16 bytes"),
        ("over-q", lambda case: shared(case, "workspace", "q"), "memory of its own"),
        ("over-out", lambda case: shared(case, "workspace", "out"), "memory of its own"),
    ],
    "out": [
        (f"over-{other}", lambda case, other=other: shared(case, "out", other), "memory of its own")
        for other in ("q", "cache", "indices", "lengths", "sink")
    ],
    "lse": [
        (f"over-{other}", lambda case, other=other: shared(case, "lse", other), "memory of its own")
        for other in ("q", "cache", "indices", "lengths", "sink", "out")
    ],
}


def flatten(table: dict[str, list[tuple[str, Change, str]]]) -> list:
    return [
        pytest.param(argument, change, allowed, id=f"{argument}-{what}")
        for argument, entries in table.items()
        for what, change, allowed in entries
    ]


def on_device(change: Change, case: DecodeCase, device: str) -> DecodeCase:
    """Apply a change on the device itself, so that overlaps and misalignment survive the move."""
    with torch.device(device):
        return dataclasses.replace(case, **change(case))


@every_implementation
@pytest.mark.parametrize("argument, change, allowed", flatten(WRONG_FORM) + flatten(WRONG_MEMORY))
def test_rejects(implementation, argument, change, allowed):
    device = device_of(implementation)
    case = on_device(change, small_case().to(device), device)
    before = snapshot(case)
    with expect_rejection("sparse_ckv_decode", argument, allowed):
        call(implementation, "sparse_ckv_decode", case.args())
    assert_untouched(case, before)


@every_implementation
@pytest.mark.parametrize("argument", ["q", "cache", "indices", "lengths", "sink", "out", "lse", "workspace"])
def test_rejects_freed_memory(implementation, argument):
    """As a sharded optimiser or a sleeping engine frees it: sizes stay, the storage goes."""
    case = small_case().to(device_of(implementation))
    getattr(case, argument).untyped_storage().resize_(0)
    with expect_rejection("sparse_ckv_decode", argument, "a tensor with memory"):
        call(implementation, "sparse_ckv_decode", case.args())


@every_implementation
@pytest.mark.parametrize("argument", ["cache", "indices", "lengths", "sink", "out", "lse", "workspace"])
def test_rejects_tensors_of_two_devices(implementation, argument):
    case = small_case().to(device_of(implementation))
    case = dataclasses.replace(case, **{argument: getattr(case, argument).to("meta")})
    before = snapshot(case)
    with expect_rejection("sparse_ckv_decode", argument, "where 'q' is"):
        call(implementation, "sparse_ckv_decode", case.args())
    assert_untouched(case, before)


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["cache", "indices", "lengths", "sink", "out", "lse", "workspace"])
def test_rejects_cpu_tensors_among_cuda_tensors(argument):
    case = small_case()
    mixed = dataclasses.replace(case.to("cuda"), **{argument: getattr(case, argument)})
    with expect_rejection("sparse_ckv_decode", argument, "device cuda"):
        call("op-cuda", "sparse_ckv_decode", mixed.args())


@pytest.mark.parametrize("argument, change, allowed", flatten(WRONG_FORM))
def test_rejects_on_meta_tensors(argument, change, allowed):
    case = on_device(change, small_case(), "cpu")
    with expect_rejection("sparse_ckv_decode", argument, allowed):
        torch.ops.torch_sparse_mla.sparse_ckv_decode(*case.to("meta").args())


@pytest.mark.parametrize("argument, change, allowed", flatten(WRONG_FORM))
def test_rejects_on_fake_cuda_tensors(argument, change, allowed):
    """As `torch.compile` sees them, on a machine without a GPU too."""
    case = on_device(change, small_case(), "cpu")
    with FakeTensorMode():
        fake = dataclasses.replace(
            case,
            **{
                name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
                for name, tensor in case.tensors().items()
            },
        )
        with expect_rejection("sparse_ckv_decode", argument, allowed):
            torch.ops.torch_sparse_mla.sparse_ckv_decode(*fake.args())


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_public_function_rejects_empty_dimensions(batch_invariant):
    """It works out sizes before the operator checks: no division by a size of 0."""
    case = small_case()
    for argument, q, indices in (("q", case.q[:, :0], case.indices), ("indices", case.q, case.indices[:, :0])):
        with expect_rejection("sparse_ckv_decode", argument, "1.."):
            torch_sparse_mla.sparse_ckv_decode(
                q, case.cache, indices, softmax_scale=1.0, layout=case.layout, batch_invariant=batch_invariant
            )


def test_public_merge_rejects_no_partials():
    with expect_rejection("merge_partial_attention", "partial_out", "partials >= 1"):
        torch_sparse_mla.merge_partial_attention(torch.zeros(0, 2, 3, 512), torch.zeros(0, 2, 3))


@pytest.mark.gpu
def test_rejects_float64_queries_on_cuda():
    case = make_case(dtype=torch.float64).to("cuda")
    with expect_rejection("sparse_ckv_decode", "q", "dtype bfloat16 or float16 or float32"):
        call("op-cuda", "sparse_ckv_decode", case.args())


@every_implementation
def test_accepts_sizes_at_the_limits(implementation):
    """The neighbours of what is refused: 128 heads, K = 16,384, an odd row stride, a larger workspace."""
    case = make_case(rows=1, heads=128, topk=1, lengths=[0])
    indices = torch.full((1, MAX_TOPK), -1, dtype=torch.int32)
    size = sparse_ckv_decode_workspace_bytes(1, 128, MAX_TOPK) + 1
    case = dataclasses.replace(case, indices=indices, workspace=torch.empty(size, dtype=torch.uint8))
    moved = case.to(device_of(implementation))
    call(implementation, "sparse_ckv_decode", moved.args())
    assert torch.isneginf(moved.lse).all()


@dataclasses.dataclass(frozen=True)
class MergeCase:
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    sink: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor

    def args(self) -> tuple:
        return (self.partial_out, self.partial_lse, self.sink, self.out, self.lse)


def merge_case(device: str = "cpu") -> MergeCase:
    tensors = (torch.ones(4, 2, 3, 512), torch.zeros(4, 2, 3), torch.zeros(3), torch.ones(2, 3, 512), torch.ones(2, 3))
    return MergeCase(*(move(tensor, device) for tensor in tensors))


WRONG_MERGE: dict[str, list[tuple[str, Callable[[MergeCase], dict[str, object]], str]]] = {
    "partial_out": [
        ("int32", lambda case: {"partial_out": case.partial_out.int()}, "dtype bfloat16 or float16 or float32"),
        ("3d", lambda case: {"partial_out": case.partial_out[0]}, "shape [partials >= 1, rows, heads, 512]"),
        ("none", lambda case: {"partial_out": case.partial_out[:0]}, "partials >= 1"),
        ("width", lambda case: {"partial_out": case.partial_out[..., :256].contiguous()}, "512]"),
        (
            "stride",
            lambda case: {"partial_out": gapped(case.partial_out)},
            "contiguous parts, 3072 elements or more apart",
        ),
        ("overlap", lambda case: {"partial_out": case.partial_out[:1].expand(4, -1, -1, -1)}, "3072 elements or more"),
        ("apart", lambda case: {"partial_out": apart(case.partial_out, 3074)}, "a multiple of 16 bytes"),
    ],
    "partial_lse": [
        ("bfloat16", lambda case: {"partial_lse": case.partial_lse.bfloat16()}, "dtype float32"),
        ("partials", lambda case: {"partial_lse": case.partial_lse[:3]}, "[4, 2, 3]"),
        (
            "stride",
            lambda case: {"partial_lse": gapped(case.partial_lse)},
            "contiguous parts, 6 elements or more apart",
        ),
    ],
    "sink": [
        ("float16", lambda case: {"sink": case.sink.half()}, "dtype float32"),
        ("heads", lambda case: {"sink": case.sink[:2]}, "shape [heads] = [3]"),
    ],
    "out": [
        ("float64", lambda case: {"out": case.out.double()}, "dtype bfloat16 or float16 or float32"),
        ("rows", lambda case: {"out": case.out[:1]}, "shape [rows, heads, 512] = [2, 3, 512]"),
        ("stride", lambda case: {"out": gapped(case.out)}, "a contiguous tensor"),
    ],
    "lse": [
        ("bfloat16", lambda case: {"lse": case.lse.bfloat16()}, "dtype float32"),
        ("heads-first", lambda case: {"lse": case.lse.T.contiguous()}, "shape [rows, heads] = [2, 3]"),
        ("stride", lambda case: {"lse": gapped(case.lse)}, "a contiguous tensor"),
    ],
}

WRONG_MERGE_MEMORY = {
    "out": [
        (f"over-{other}", lambda case, other=other: shared(case, "out", other), "memory of its own")
        for other in ("partial_out", "partial_lse", "sink")
    ],
    "lse": [("over-out", lambda case: shared(case, "lse", "out"), "memory of its own")],
}


@every_implementation
@pytest.mark.parametrize("argument, change, allowed", flatten(WRONG_MERGE) + flatten(WRONG_MERGE_MEMORY))
def test_merge_rejects(implementation, argument, change, allowed):
    device = device_of(implementation)
    case = on_device(change, merge_case(device), device)
    before = snapshot(case)
    with expect_rejection("merge_partial_attention", argument, allowed):
        call(implementation, "merge_partial_attention", case.args())
    assert_untouched(case, before)


@pytest.mark.parametrize("argument, change, allowed", flatten(WRONG_MERGE))
def test_merge_rejects_on_meta_tensors(argument, change, allowed):
    case = on_device(change, merge_case("meta"), "meta")
    with expect_rejection("merge_partial_attention", argument, allowed):
        torch.ops.torch_sparse_mla.merge_partial_attention(*case.args())


def test_public_functions_refuse_gradients():
    q = torch.zeros(1, 2, 512, requires_grad=True)
    cache = torch.zeros(1, 4, 528, dtype=torch.uint8)
    indices = torch.zeros(1, 3, dtype=torch.int32)
    settings = {"softmax_scale": 1.0, "layout": "fp8_mla_nope"}
    message = "argument '{}': got a tensor that requires a gradient; allowed: torch.no_grad"
    with pytest.raises(ValueError, match=message.format("q")):
        torch_sparse_mla.sparse_ckv_decode(q, cache, indices, **settings)
    out = torch.zeros(1, 2, 512, requires_grad=True)
    with pytest.raises(ValueError, match=message.format("out")):
        torch_sparse_mla.sparse_ckv_decode(q.detach(), cache, indices, out=out, **settings)
    with pytest.raises(ValueError, match=message.format("partial_out")):
        torch_sparse_mla.merge_partial_attention(q[None], torch.zeros(1, 1, 2))
    with torch.no_grad():
        torch_sparse_mla.sparse_ckv_decode(q, cache, indices, **settings)


def test_public_function_rejects_wrong_numbers_of_dimensions_by_name():
    cache = torch.zeros(1, 4, 528, dtype=torch.uint8)
    for q, indices, argument in (
        (torch.zeros(512), torch.zeros(1, 3, dtype=torch.int32), "q"),
        (torch.zeros(1, 2, 512), torch.tensor(3, dtype=torch.int32), "indices"),
    ):
        with pytest.raises(ValueError, match=f"argument '{argument}': got shape"):
            torch_sparse_mla.sparse_ckv_decode(q, cache, indices, softmax_scale=1.0, layout="fp8_mla_nope")


def test_public_function_refuses_tangents():
    """Forward mode too; what does not carry one may be attended to meanwhile."""
    case = small_case()

    def decode(q: torch.Tensor) -> torch.Tensor:
        return torch_sparse_mla.sparse_ckv_decode(q, case.cache, case.indices, softmax_scale=1.0, layout=case.layout)[0]

    with expect_rejection("sparse_ckv_decode", "q", "a tensor outside of forward-mode"):
        torch.func.jvp(decode, (case.q,), (case.q,))
    plain = torch.func.jvp(lambda x: (x * 2, decode(case.q)), (torch.ones(1),), (torch.ones(1),))[0][1]
    torch.testing.assert_close(plain, decode(case.q), rtol=0, atol=0, equal_nan=True)
