"""One decode step of a rank whose cache is sharded by decode context parallelism, by whichever way costs least.

takes: local heads' queries, this rank's caches, top-k lists of global positions. gives: attention of the local heads
over all selected records, whoever owns them.
Reading order: steps (how ranks that share a thread take turns) -> decode (the class) -> strategies -> gather -> peers
-> costs -> measure -> contract.
"""

from .costs import LinkCosts, union_growth
from .decode import DcpSparseDecode
from .peers import PeerCaches
from .steps import run_loopback

__all__ = ["DcpSparseDecode", "LinkCosts", "PeerCaches", "run_loopback", "union_growth"]
