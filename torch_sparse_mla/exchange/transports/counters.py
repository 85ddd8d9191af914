"""The counters of a channel on the CPU. As on a GPU they are words of the state tensor, and they wrap."""

import torch

from ..channel import ERRORS, START_BEFORE_WAIT, STARTED, WAIT_BEFORE_START, WAITED
from ..contract import ExchangeCall

MODULUS = 1 << 32


def next_epoch(call: ExchangeCall) -> int:
    """Epoch of the exchange that `call` starts. Counts nothing yet."""
    started, waited = _counters(call)
    if started != waited:
        raise call.channel.error(ERRORS[START_BEFORE_WAIT], started)
    return (started + 1) % MODULUS


def open_epoch(call: ExchangeCall) -> int:
    """Epoch of the exchange that `call` waits for."""
    started, waited = _counters(call)
    if started == waited:
        raise call.channel.error(ERRORS[WAIT_BEFORE_START], waited)
    return started


def count(call: ExchangeCall, word: int, epoch: int) -> None:
    """Write a counter: a step of the exchange is complete."""
    call.state[word] = torch.tensor(epoch, dtype=torch.int64).to(torch.int32)


def _counters(call: ExchangeCall) -> tuple[int, int]:
    return int(call.state[STARTED]) % MODULUS, int(call.state[WAITED]) % MODULUS
