"""Destruction in the wrong order raises; in the right one it does not."""

import gc

import pytest

from torch_sparse_mla import Channel, LoopbackGroup, lifetimes


class Graph:
    def __init__(self, name: str) -> None:
        self.name, self.uses = name, []

    def __str__(self) -> str:
        return self.name


def captured(name: str, users: lifetimes.Users) -> Graph:
    graph = Graph(name)
    lifetimes.begin_capture(graph)
    try:
        lifetimes.note_use(users)
    finally:
        lifetimes.end_capture()
    return graph


def test_a_thing_names_the_graphs_that_use_it():
    users = lifetimes.Users()
    users.refuse_if_any("it")
    graphs = [captured(f"graph {number}", users) for number in range(5)]
    with pytest.raises(RuntimeError, match=r"it is still used by 5 captured .* graph 0, graph 1, graph 2 and 2 more"):
        users.refuse_if_any("it")
    for graph in graphs[1:]:
        users.discard(graph)
    with pytest.raises(RuntimeError, match=r"used by 1 captured CUDA graph.*: graph 0; release"):
        users.refuse_if_any("it")
    users.discard(graphs[0])
    users.refuse_if_any("it")


def test_a_graph_that_was_dropped_uses_nothing():
    users = lifetimes.Users()
    captured("graph", users)
    gc.collect()
    users.refuse_if_any("it")


def test_use_outside_a_capture_is_no_use():
    users = lifetimes.Users()
    lifetimes.note_use(users)
    assert users.names() == []


def test_a_channel_outlives_the_graphs_that_captured_it():
    channel = Channel.create("kept", LoopbackGroup(1, "cpu").rank(0), 4, 16)
    graph = captured("step, 8 rows #0", channel.users)
    with pytest.raises(RuntimeError, match=r"channel 'kept:0' is still used by 1 captured .*step, 8 rows #0; release"):
        channel.close()
    assert channel.transport is not None
    channel.users.discard(graph)
    channel.close()
    channel.close()
