"""What `demo` needs to run as several processes: `torchrun --nproc-per-node W -m torch_sparse_mla demo ...`.

On CPUs, and where processes share a GPU, they form a gloo group; with a GPU each, a NCCL group. Rank 0 prints.
"""

import contextlib
import io
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

# PyTorch maps memory between processes that share a GPU only where this is set.
SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def launched_world() -> int | None:
    """How many processes torchrun started; None where it did not start this one."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_available() and dist.is_torchelastic_launched() else None


def own_device(device: torch.device) -> torch.device:
    """The device of this process: of the GPUs, one after another by local rank, unless one is named."""
    if device.type != "cuda" or device.index is not None or launched_world() is None:
        return device
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


@contextlib.contextmanager
def group_of_processes(device: torch.device) -> Iterator[str | None]:
    """The default process group, while it lasts, in words; None, and nothing else, without torchrun."""
    if launched_world() is None:
        yield None
        return
    shared = device.type == "cuda" and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count()
    backend = "nccl" if device.type == "cuda" and not shared else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if shared:
        os.environ.setdefault(SHARED_GPU, "1")
    dist.init_process_group(backend)
    try:
        yield f"{backend} group of {dist.get_world_size()} processes{' that share a GPU' if shared else ''}"
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def only_rank_0_prints() -> Iterator[None]:
    silent = dist.is_initialized() and dist.get_rank() > 0
    with contextlib.redirect_stdout(io.StringIO()) if silent else contextlib.nullcontext():
        yield


def faults_of_all_ranks(faults: list[str]) -> list[str]:
    """This process's faults, and those that other processes alone saw, so that all end with the same code."""
    if not dist.is_initialized():
        return faults
    told: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, faults)
    others = [f"rank {rank}: {fault}" for rank, those in enumerate(told) for fault in those if fault not in faults]
    return faults + others


def is_first() -> bool:
    """Whether this process writes files."""
    return not dist.is_initialized() or dist.get_rank() == 0
