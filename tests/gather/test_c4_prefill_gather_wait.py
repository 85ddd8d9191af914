"""`c4_prefill_gather_wait`: what the second half refuses, and its opcheck."""

import pytest
import torch

from torch_sparse_mla import ExchangeError

from ..decode.rejections import expect_rejection
from .cases import CHUNKS, make_layers, open_channels

op = torch.ops.torch_sparse_mla.c4_prefill_gather_wait.default
start = torch.ops.torch_sparse_mla.c4_prefill_gather_start.default


def test_a_wait_without_a_start_is_refused():
    chunk = CHUNKS["one-rank"]
    channels = open_channels(chunk, 16)
    (layer,), _ = make_layers(chunk, channels, 16, seed=1)
    with pytest.raises(ExchangeError, match="was not started; start first"):
        op(*layer.arguments())
    channels[0].close()


def test_a_peer_that_never_comes_is_named_in_time():
    chunk = CHUNKS["two-requests-cached"]
    channels = open_channels(chunk, 16, timeout_s=0.1)
    layers, _ = make_layers(chunk, channels, 16, seed=2)
    for layer in (layers[0], layers[1], layers[3]):
        start(*layer.arguments())
    with pytest.raises(ExchangeError, match=r"rank 2 did not come within 0\.1 s"):
        op(*layers[0].arguments())
    for channel in channels:
        channel.close()


def test_rejects_under_its_own_name():
    chunk = CHUNKS["one-rank"]
    channels = open_channels(chunk, 16)
    (layer,), _ = make_layers(chunk, channels, 16, seed=3)
    with expect_rejection("c4_prefill_gather_wait", "plan", "dtype int32"):
        op(layer.cache, layer.plan.long(), layer.gathered, channels[0].state, channels[0].name)
    channels[0].close()


def test_opcheck():
    chunk = CHUNKS["one-rank"]
    channels = open_channels(chunk, 37)
    (layer,), expected = make_layers(chunk, channels, 37, seed=4)
    start(*layer.arguments())
    torch.library.opcheck(op, layer.arguments())
    op(*layer.arguments())
    assert torch.equal(layer.gathered, expected)
    channels[0].close()
