"""The exchange: every rank's selected records go to every rank, in the order in which attention will read them.

takes: paged caches, a selection plan. gives: workspaces of records in union order, one for each layer.
Reading order: channel (timeline, life of a channel) -> group (its ranks) -> contract (what the operators accept) ->
transports/loopback (the shortest form) -> transports/collective -> triton_kernels -> transports/direct.
"""
