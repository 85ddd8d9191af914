"""`c4_prefill_gather_start`: what the first half alone promises, and its opcheck."""

import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla import ExchangeError

from ..decode.rejections import expect_rejection
from .cases import CHUNKS, POISON_BYTE, make_layers, open_channels

op = torch.ops.torch_sparse_mla.c4_prefill_gather_start.default


def test_the_cache_may_change_after_the_start(device):
    chunk = CHUNKS["two-requests-cached"]
    channels = open_channels(chunk, 16, device)
    layers, expected = make_layers(chunk, channels, 16, seed=1, device=device)
    for layer in layers:
        torch_sparse_mla.c4_prefill_gather_start(*layer.arguments()[:4], layer.channel)
        layer.cache.fill_(POISON_BYTE)
    for layer in layers:
        torch_sparse_mla.c4_prefill_gather_wait(*layer.arguments()[:4], layer.channel)
    for layer in layers:
        assert torch.equal(layer.gathered.cpu(), expected)
        layer.channel.check()
        layer.channel.close()


def test_the_own_slice_is_packed_in_place_by_the_start():
    """No staging copy: the own records are in the gathered buffer before anything arrives."""
    chunk = CHUNKS["two-requests-cached"]
    channels = open_channels(chunk, 16)
    layers, expected = make_layers(chunk, channels, 16, seed=2)
    op(*layers[1].arguments())
    padded = chunk.padded()
    assert torch.equal(layers[1].gathered[padded : 2 * padded], expected[padded : 2 * padded])
    assert (layers[1].gathered[:padded] == POISON_BYTE).all()
    for channel in channels:
        channel.close()


def test_a_second_start_without_a_wait_is_refused():
    chunk = CHUNKS["one-rank"]
    channels = open_channels(chunk, 16)
    (layer,), _ = make_layers(chunk, channels, 16, seed=3)
    op(*layer.arguments())
    with pytest.raises(ExchangeError, match="was not waited for"):
        op(*layer.arguments())
    channels[0].close()


def test_rejects_under_its_own_name():
    chunk = CHUNKS["one-rank"]
    channels = open_channels(chunk, 16)
    (layer,), _ = make_layers(chunk, channels, 16, seed=4)
    with expect_rejection("c4_prefill_gather_start", "gathered", "capacity_records"):
        op(layer.cache, layer.plan, layer.gathered[:-1], channels[0].state, channels[0].name)
    channels[0].close()


def test_opcheck():
    chunk = CHUNKS["one-rank"]
    channels = open_channels(chunk, 37)
    (layer,), _ = make_layers(chunk, channels, 37, seed=5)
    torch.library.opcheck(op, layer.arguments())
    channels[0].close()
