"""How the tests look at a refused call: the message's form, and that nothing was written."""

import dataclasses
import re

import pytest
import torch


def expect_rejection(op: str, argument: str, allowed: str):
    pattern = rf"torch_sparse_mla::{op}: argument '{argument}': got .+; allowed: .*{re.escape(allowed)}"
    return pytest.raises(ValueError, match=pattern)


def snapshot(case: object) -> dict[str, torch.Tensor]:
    """Every byte within each tensor's memory range, gaps between elements included."""
    values = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.numel()}
    return {name: whole_range(tensor).clone() for name, tensor in tensors.items() if tensor.device.type != "meta"}


def whole_range(tensor: torch.Tensor) -> torch.Tensor:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,)).view(torch.uint8)


def assert_untouched(case: object, before: dict[str, torch.Tensor]) -> None:
    for name, saved in before.items():
        assert torch.equal(whole_range(getattr(case, name)), saved), f"{name} was written"
