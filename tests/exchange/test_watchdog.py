"""The watchdog ends a wait that stands too long, and nothing else."""

import threading
import time

import pytest
import torch

from torch_sparse_mla.exchange.transports.watchdog import (
    NOT_WAITING,
    WAITING_FOR_LEAVE,
    WAITING_FOR_MESSAGES,
    Looks,
    Watchdog,
)

TIMEOUT_S = 0.2
DEADLINE_S = 30


class Watched:
    def __init__(self):
        self.waiting, self.progress = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self.releases, self.prepared_on = [], []
        self.released = threading.Event()
        self.watchdog = Watchdog(self.waiting, self.progress, TIMEOUT_S, self.release, self.prepare)

    def release(self):
        self.releases.append(time.monotonic())
        self.released.set()

    def prepare(self):
        self.prepared_on.append(threading.current_thread())


@pytest.fixture
def watched():
    watched = Watched()
    yield watched
    watched.watchdog.stop()


@pytest.mark.parametrize("what", [WAITING_FOR_LEAVE, WAITING_FOR_MESSAGES])
def test_a_wait_that_stands_is_released_after_the_timeout(what, watched):
    begin = time.monotonic()
    watched.waiting.fill_(what)
    assert watched.released.wait(DEADLINE_S)
    assert watched.releases[0] - begin > TIMEOUT_S
    assert watched.prepared_on == [watched.watchdog.thread]


def test_it_is_released_again_while_it_goes_on_to_stand(watched):
    """The first release may have met a flag that came at that moment."""
    watched.waiting.fill_(WAITING_FOR_MESSAGES)
    for _ in range(2):
        assert watched.released.wait(DEADLINE_S)
        watched.released.clear()


def test_who_does_not_wait_is_left_alone(watched):
    watched.progress.fill_(7)
    time.sleep(3 * TIMEOUT_S)
    assert not watched.releases


@pytest.mark.parametrize(
    "seen",
    [
        [(WAITING_FOR_MESSAGES, number) for number in range(9)],
        [(WAITING_FOR_LEAVE, 3), (WAITING_FOR_MESSAGES, 3)] * 5,
        [(WAITING_FOR_MESSAGES, 3), (NOT_WAITING, 3)] * 5,
        [(WAITING_FOR_MESSAGES, number // 2) for number in range(9)],
    ],
    ids=["other exchanges", "other waits", "ends between", "two looks each"],
)
def test_one_wait_after_another_is_no_standing_wait(seen):
    """Whenever the watchdog looks, somebody may wait; but never for long."""
    looks = Looks(TIMEOUT_S)
    assert not any(looks.is_too_long(*words, 0.9 * TIMEOUT_S * number) for number, words in enumerate(seen))


def test_a_wait_is_too_long_once_in_a_timeout():
    looks = Looks(2.0)
    late = [looks.is_too_long(WAITING_FOR_LEAVE, -1, float(now)) for now in range(8)]
    assert late == [False, False, False, True, False, False, True, False]


def test_stop_ends_the_thread_and_may_be_repeated(watched):
    for _ in range(2):
        watched.watchdog.stop()
    assert not watched.watchdog.thread.is_alive()
    watched.waiting.fill_(WAITING_FOR_MESSAGES)
    time.sleep(2 * TIMEOUT_S)
    assert not watched.releases
