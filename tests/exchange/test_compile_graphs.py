"""Pinned graphs: no exchange is removed or moved, and no workspace is cloned, with auto-functionalisation v1 and v2."""

import expecttest
import torch

from tests.decode.compiled_graphs import compiled_calls, functionalised_calls

from .cases import Shape, make_step, make_world

ops = torch.ops.torch_sparse_mla


def layers_of(rank, channel):
    return [*rank.caches, *rank.workspaces], rank.plan, channel.state, channel.name


def two_steps(tensors, plan, state, channel):
    """A combined call, then an overlapped one; nothing that they write is returned."""
    caches, workspaces = tensors[:3], tensors[3:]
    ops.ce_exchange(caches[0], plan, workspaces[0], state, channel)
    ops.ce_exchange_start(caches[1:], plan, workspaces[1:], state, channel)
    overlapped = caches[0].float() * 2
    ops.ce_exchange_wait(caches[1:], plan, workspaces[1:], state, channel)
    ops.ce_exchange_layers(caches, plan, workspaces, state, channel)
    return overlapped


class CompiledGraphs(expecttest.TestCase):
    def setUp(self):
        self.world = make_world(Shape(world=1))
        self.step = make_step(self.world.shape, torch.Generator().manual_seed(1))
        self.world.load(self.step)
        self.inputs = layers_of(self.world.ranks[0], self.world.channels[0])

    def tearDown(self):
        self.world.close()

    def test_every_call_survives_in_order(self):
        for v2 in (True, False):
            calls = functionalised_calls(two_steps, self.inputs, v2)
            exchanges = [line.split(": ")[1] for line in calls.splitlines() if "ce_exchange" in line]
            assert exchanges == [
                "torch_sparse_mla.ce_exchange.default",
                "torch_sparse_mla.ce_exchange_start.default",
                "torch_sparse_mla.ce_exchange_wait.default",
                "torch_sparse_mla.ce_exchange_layers.default",
            ]

    def test_the_callers_buffers_are_written_in_place(self):
        for v2 in (True, False):
            self.world.load(self.step)
            calls = compiled_calls(two_steps, self.inputs, v2)
            self.assertExpectedInline(
                "\n".join(line for line in calls.splitlines() if "torch_sparse" in line),
                """\
torch_sparse_mla.ce_exchange(input, input, input, input)
torch_sparse_mla.ce_exchange_start(input, input, input, input, input, input)
torch_sparse_mla.ce_exchange_wait(input, input, input, input, input, input)
torch_sparse_mla.ce_exchange_layers(input, input, input, input, input, input, input, input)""",
            )
            assert "clone" not in calls
            self.world.assert_arrived(self.step)
            assert self.world.channels[0].state[0] == self.world.channels[0].state[1]
