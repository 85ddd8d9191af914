"""CPU implementations of the exchange operators: the checks, then what the channel's transport does."""

import torch

from .. import trace
from . import contract
from .contract import ExchangeCall


def ce_exchange(
    cache: torch.Tensor, plan: torch.Tensor, workspace: torch.Tensor, state: torch.Tensor, channel: str
) -> None:
    _exchange(contract.check_ce_exchange(cache, plan, workspace, state, channel))


def ce_exchange_layers(
    caches: list[torch.Tensor], plan: torch.Tensor, workspaces: list[torch.Tensor], state: torch.Tensor, channel: str
) -> None:
    _exchange(contract.check_ce_exchange_layers(caches, plan, workspaces, state, channel))


def ce_exchange_start(
    caches: list[torch.Tensor], plan: torch.Tensor, workspaces: list[torch.Tensor], state: torch.Tensor, channel: str
) -> None:
    call = contract.check_ce_exchange_start(caches, plan, workspaces, state, channel)
    _start(call)


def ce_exchange_wait(
    caches: list[torch.Tensor], plan: torch.Tensor, workspaces: list[torch.Tensor], state: torch.Tensor, channel: str
) -> None:
    call = contract.check_ce_exchange_wait(caches, plan, workspaces, state, channel)
    _wait(call)


def _exchange(call: ExchangeCall) -> None:
    call.channel.transport.refuse_if_alone(call)
    _start(call)
    _wait(call)


def _start(call: ExchangeCall) -> None:
    trace.begin("ce_exchange/pack", _reserved_bytes(call))
    try:
        call.channel.transport.start(call)
    finally:
        trace.end()


def _wait(call: ExchangeCall) -> None:
    trace.begin("ce_exchange/arrival", _reserved_bytes(call))
    try:
        call.channel.transport.wait(call)
    finally:
        trace.end()


def _reserved_bytes(call: ExchangeCall) -> int:
    """How many bytes move depends on the plan's contents, which the host does not know."""
    sizes = call.channel.configuration
    return call.layers * sizes.capacity_records * sizes.record_bytes
