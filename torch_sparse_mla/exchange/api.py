"""Public functions of the exchange family."""

import torch

from .. import _ops  # noqa: F401  (registers the operators)
from .channel import Channel


def ce_exchange(
    cache: torch.Tensor, plan: torch.Tensor, workspace: torch.Tensor, state: torch.Tensor, channel: str | Channel
) -> None:
    """Bring every record that a plan selects into this rank's workspace, from whichever rank owns it: one layer.

    Args:
        cache: [pages, page_size, record_bytes] uint8, this rank's part; page stride free, records packed in a page.
        plan: int32, what `plan_selection` wrote for this rank, with the channel's requests and capacity.
        workspace: [capacity_records, record_bytes] uint8, contiguous; record `request * capacity_per_request + i` is
            overwritten with the i-th record of the request's union. Records beyond a union stay as they are. Also as
            [1, capacity_records, record_bytes], a cache of one page: the other operators then take it without a view,
            which compilers that do not know views of mutated arguments would copy. One of `channel.workspaces` is
            filled by peers at once, and has rules of its own: see `Channel`.
        state: `channel.state`.
        channel: the channel, or its name.
    Raises: ValueError for an argument that does not fit, before anything is written or counted. ExchangeError where a
        peer does not come within the timeout, moves another number of layers or has other owner offsets in its plan
        (other tokens under equal offsets are not noticed); for CUDA tensors later, by the next eager call or by
        `channel.check()`, as for a state of another channel. What is left of the channel: see ExchangeError.
    Capture: safe; cache, plan and their contents may change between replays. Ranks: all, with the same calls.
        A slot of the plan that the cache lacks arrives as zeros (checked mode, `TORCH_SPARSE_MLA_CHECK=1`, raises).
    """
    torch.ops.torch_sparse_mla.ce_exchange(cache, plan, workspace, state, _name(channel))


def ce_exchange_layers(
    caches: list[torch.Tensor],
    plan: torch.Tensor,
    workspaces: list[torch.Tensor],
    state: torch.Tensor,
    channel: str | Channel,
) -> None:
    """`ce_exchange` for several layers that share one selection, in one exchange with one arrival.

    Args:
        caches: 1 to `layers` (those of the channel) caches of one shape and one set of strides.
        plan: as for `ce_exchange`.
        workspaces: as many workspaces.
        state, channel: as for `ce_exchange`.
    Raises: as `ce_exchange`.
    Capture: as `ce_exchange`. Ranks: all, with the same number of layers.
    """
    torch.ops.torch_sparse_mla.ce_exchange_layers(caches, plan, workspaces, state, _name(channel))


def ce_exchange_start(
    caches: list[torch.Tensor],
    plan: torch.Tensor,
    workspaces: list[torch.Tensor],
    state: torch.Tensor,
    channel: str | Channel,
) -> None:
    """First half of `ce_exchange_layers`: send what this rank owns. What follows runs while records travel.

    Args:
        caches: as for `ce_exchange_layers`; they may change as soon as the call is done, in stream order.
        plan, workspaces: as for `ce_exchange_layers`; until `ce_exchange_wait` the workspaces are undefined.
        state, channel: as for `ce_exchange`.
    Raises: as `ce_exchange`; ExchangeError where the exchange before was not waited for.
    Capture: as `ce_exchange`; over copy engines or NCCL in one graph with its wait. Ranks: all.
    """
    torch.ops.torch_sparse_mla.ce_exchange_start(caches, plan, workspaces, state, _name(channel))


def ce_exchange_wait(
    caches: list[torch.Tensor],
    plan: torch.Tensor,
    workspaces: list[torch.Tensor],
    state: torch.Tensor,
    channel: str | Channel,
) -> None:
    """Second half of `ce_exchange_layers`: wait for every peer's records.

    Args:
        caches, plan, workspaces: those of `ce_exchange_start`, the plan unchanged. The workspaces then hold the unions.
        state, channel: as for `ce_exchange`.
    Raises: as `ce_exchange`; ExchangeError where nothing was started.
    Capture: as `ce_exchange_start`. Ranks: all.
    """
    torch.ops.torch_sparse_mla.ce_exchange_wait(caches, plan, workspaces, state, _name(channel))


def _name(channel: str | Channel) -> str:
    return channel.name if isinstance(channel, Channel) else channel
