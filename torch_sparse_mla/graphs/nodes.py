"""What a captured CUDA graph consists of, asked of the driver."""

import collections
import ctypes

NODE_TYPES = (
    "kernel",
    "memcpy",
    "memset",
    "host",
    "graph",
    "empty",
    "wait event",
    "event record",
    "semaphore signal",
    "semaphore wait",
    "memory alloc",
    "memory free",
    "batch memory operation",
    "conditional",
)


def node_counts(raw_graph: int) -> dict[str, int]:
    """Number of nodes by type. `raw_graph`: a cudaGraph_t, from `CUDAGraph(keep_graph=True).raw_cuda_graph()`."""
    driver = ctypes.CDLL("libcuda.so.1")
    graph, count = ctypes.c_void_p(raw_graph), ctypes.c_size_t(0)
    _check(driver.cuGraphGetNodes(graph, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _check(driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count)))
    types = collections.Counter()
    for node in nodes:
        number = ctypes.c_int(-1)
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(number)))
        known = 0 <= number.value < len(NODE_TYPES)
        types[NODE_TYPES[number.value] if known else f"type {number.value}"] += 1
    return dict(types)


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"torch_sparse_mla.graphs.node_counts: the CUDA driver reports error {result}")
