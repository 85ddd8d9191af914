"""Worlds whose ranks send packed messages, for the tests in Triton's interpreter."""

import pytest


@pytest.fixture(params=["ce", "collective"])
def transport(request):
    return request.param


@pytest.fixture
def worlds():
    """Closes the channels, which ends their watchdogs."""
    from .host_operations import message_world

    made = []
    yield lambda shape, transport, **sizes: made.append(message_world(shape, transport, **sizes)) or made[-1]
    for world in made:
        world.close()
