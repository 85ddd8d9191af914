"""The four-layer step in each mode, ready to run: what `profile` and `bench modes` measure."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..graphs import CompiledStep, compile
from ..records.layouts import LAYOUTS
from .decode_step import PADDING, ROWS, DecodeStep, StepSizes

# Name -> (mode of `compile`, needs a GPU). "eager" is the function by itself.
MODES = {"eager": (None, False), "compiled": ("NONE", False), "piecewise": ("PIECEWISE", True), "full": ("FULL", True)}


class Prepared(NamedTuple):
    """A mode that is compiled and captured.

    Attributes:
        name: a key of MODES.
        call: one step. result: what it returned, of the same inputs in every mode.
        step: the compiled step; None for eager.
    """

    name: str
    call: Callable[[], torch.Tensor]
    step: CompiledStep | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say what the step is made of."""
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: auto")
    parser.add_argument("--rows", type=_positive, default=None, metavar="N", help="query rows; default: 8, on a CPU 2")
    parser.add_argument("--heads", type=_positive, default=16, metavar="N", help="of each rank; default: 16")
    parser.add_argument("--topk", type=_positive, default=None, metavar="K", help="default: 2048, on a CPU 256")
    parser.add_argument("--context", type=_positive, default=None, help="tokens a request; default: 4 x top-k")
    parser.add_argument("--hidden", type=_positive, default=None, help="default: 4096, on a CPU 256")
    parser.add_argument("--world", type=_positive, default=2, metavar="W", help="loopback ranks; default: 2")
    parser.add_argument("--layout", default="fp8_ds_mla", choices=tuple(LAYOUTS), help="default: fp8_ds_mla")


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: an integer from 1 to {1 << 20}")
    return int(text)


def device_of(options: argparse.Namespace) -> torch.device:
    """Refuses, through the parser, a GPU where there is none."""
    if options.device == "cuda" and not torch.cuda.is_available():
        options.parser.error("argument --device: got 'cuda', but PyTorch sees no CUDA device here; allowed: auto, cpu")
    if options.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def sizes_of(options: argparse.Namespace, device: torch.device) -> StepSizes:
    """The sizes asked for; small ones by default where there is no GPU."""
    cuda = device.type == "cuda"
    topk = options.topk or (2048 if cuda else 256)
    context = options.context or 4 * topk
    if context < topk:
        options.parser.error(f"argument --context: got {context}; allowed: at least the top-k, {topk}")
    return StepSizes(
        rows=options.rows or (8 if cuda else 2),
        heads=options.heads,
        topk=topk,
        layout=options.layout,
        world=options.world,
        context=context,
        hidden=options.hidden or (4096 if cuda else 256),
        dtype=torch.bfloat16,
    )


def modes_for(given: list[str] | None, device: torch.device, parser: argparse.ArgumentParser) -> list[str]:
    """The modes asked for; all that the device has where none is."""
    possible = [name for name, (_, needs_gpu) in MODES.items() if device.type == "cuda" or not needs_gpu]
    for name in given or []:
        if name != "all" and name not in possible:
            parser.error(f"argument --mode: got {name!r}; allowed on {device.type}: all, {', '.join(possible)}")
    return possible if not given or "all" in given else list(dict.fromkeys(given))


def prepare(step: DecodeStep, name: str, backend: str = "inductor") -> Prepared:
    """Compile and capture one mode, and run it until nothing is left to be set up."""
    rows = step.sizes.rows
    mode, _ = MODES[name]
    if mode is None:
        made = Prepared(name, lambda: step.run(*step.inputs), None)
    else:
        compiled = compile(step.run, mode, None if mode == "NONE" else (rows,), rows=ROWS, padding=PADDING,
                           backend=backend)  # fmt: skip
        compiled.capture(*step.inputs)
        made = Prepared(name, lambda: compiled(*step.inputs), compiled)
    with torch.no_grad():
        for _ in range(3):
            made.call()
    synchronise(step.device)
    return made


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
