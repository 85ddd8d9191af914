"""The four-layer step in one mode, between cudaProfilerStart and cudaProfilerStop, for the Nsight tools."""

import argparse
import sys

import torch

from torch_sparse_mla.commands import step_modes
from torch_sparse_mla.commands.decode_step import DecodeStep


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    step_modes.add_arguments(parser)
    parser.add_argument("--mode", default="full", choices=tuple(step_modes.MODES))
    parser.add_argument("--steps", type=int, default=10, help="default: 10")
    parser.set_defaults(parser=parser)
    options = parser.parse_args(argv)
    device = step_modes.device_of(options)
    (mode,) = step_modes.modes_for([options.mode], device, parser)
    step = DecodeStep(step_modes.sizes_of(options, device), device)
    made = step_modes.prepare(step, mode)
    cuda = device.type == "cuda"
    with torch.no_grad():
        step_modes.synchronise(device)
        if cuda:
            torch.cuda.cudart().cudaProfilerStart()
        for _ in range(options.steps):
            made.call()
        step_modes.synchronise(device)
        if cuda:
            torch.cuda.cudart().cudaProfilerStop()
    if made.step is not None:
        made.step.release()
    step.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
