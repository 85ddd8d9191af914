"""One decode step of a rank whose cache is sharded by decode context parallelism, by whichever way costs least.

takes: local heads' queries, this rank's caches, top-k lists of global positions. gives: attention of the local heads
over all selected records, whoever owns them.
Reading order: steps (how ranks that share a thread take turns) -> decode (the class) -> strategies -> gather -> costs
-> contract.
"""

from .costs import LinkCosts
from .decode import DcpSparseDecode
from .steps import run_loopback

__all__ = ["DcpSparseDecode", "LinkCosts", "run_loopback"]
