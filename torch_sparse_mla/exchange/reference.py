"""CPU implementations of the exchange operators: the checks, then what the channel's transport does."""

import torch

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
    call.channel.transport.start(call)


def ce_exchange_wait(
    caches: list[torch.Tensor], plan: torch.Tensor, workspaces: list[torch.Tensor], state: torch.Tensor, channel: str
) -> None:
    call = contract.check_ce_exchange_wait(caches, plan, workspaces, state, channel)
    call.channel.transport.wait(call)


def _exchange(call: ExchangeCall) -> None:
    call.channel.transport.refuse_if_alone(call)
    call.channel.transport.start(call)
    call.channel.transport.wait(call)
