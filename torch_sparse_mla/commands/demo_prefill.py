"""`demo --prefill`: what is run, and how it is printed."""

import argparse
import collections
import json
import logging
import warnings

import torch

from .. import explain
from . import processes
from .console import Steps, print_table
from .demo import device_name, json_header, prompt_tokens

MODEL = "glm5_next"
LAYOUTS = ("bf16_mla_nope", "fp8_mla_nope")
WORLD, TOKENS = 4, 6
REFUSED = ("model", "context", "strategy", "mode", "dtype", "plot")
KIB = 1024
LEGEND = """
tokens equal: to those of one rank, and to those of Transformers alone (T).  from 1, from T: largest logit differences
beyond: rows that differ by more than the layout allows.  selected alike: index rows that select what T's indexers would
KiB moved / ordinary: what a rank received for the chunks, in all sparse layers, and what it would have received without
any gather: queries and partial results, counted in bf16.  chunks: which way they went, and why not by gather"""


def complete(options: argparse.Namespace) -> None:
    """Refuse options that say nothing about prefills, and fill in what is left out."""
    for name in REFUSED:
        given = getattr(options, name)
        if given is not None:
            allowed = f"none (with --prefill: {MODEL} in float32, of fixed lengths)"
            options.parser.error(f"argument --{name}: got {given!r}; allowed: {allowed}")
    options.model = [MODEL]
    options.layout = options.layout or list(LAYOUTS)
    options.tokens = options.tokens or TOKENS
    if options.world is None and processes.launched_world() is None:
        options.world = WORLD


def run(options: argparse.Namespace, device: torch.device, layouts: list[str], group: str | None) -> int:
    """Run the six cases with each layout. Returns 1 if a gate fails, else 0.

    Args:
        group: the processes that are the ranks, in words; None: the ranks take turns in this one.
    """
    kernel = explain("sparse_ckv_decode", device)
    print(
        f"Chunked prefills of {MODEL}, random weights of seed {options.seed}, float32, on {device_name(device)}; "
        f"sparse_ckv_decode runs as {kernel['kernel']} ({kernel['why']}); PyTorch {torch.__version__}"
    )
    where = f"each a process: {group}" if group else "in this process, which take turns on one device"
    print(f"{options.world} rank(s), {where}; Transformers' linear attention, {options.tokens} tokens generated")
    runs = _run_all(options, device, layouts, group is not None)
    print(LEGEND)
    for layout in layouts:
        _print_layout(options.world, layout, [run for run in runs if run["layout"] == layout])
    if options.json and processes.is_first():
        options.json.write_text(json.dumps({**json_header(options, device), "runs": runs}, indent=2) + "\n")
    return _print_verdict(runs)


def _run_all(options: argparse.Namespace, device: torch.device, layouts: list[str], in_processes: bool) -> list[dict]:
    from transformers.utils import logging as transformers_logging

    from ..indexer.pools import TOKENS_PER_INDEX_PAGE as page_size
    from ..integrations import tiny_models
    from .prefill_cases import judge_cases, make_cases, run_cases, text_length

    # Notes on optional kernels, of no use here.
    transformers_logging.set_verbosity(logging.ERROR)
    unit = page_size * options.world
    cases = make_cases(prompt_tokens(options.prompt, text_length(unit))[0].to(device), unit)
    runs = []
    with warnings.catch_warnings(), torch.inference_mode(), Steps(3 * len(layouts)) as steps:
        warnings.simplefilter("ignore")
        model = tiny_models.build(MODEL, seed=options.seed, device=device)
        for layout in layouts:
            given = (model, layout, cases, options.tokens)
            steps.begin(f"{layout}: six cases over 1 rank")
            unsharded = run_cases(*given, world=1, processes=False, page_size=page_size)
            steps.begin(f"{layout}: six cases over {options.world} rank(s)")
            sharded = run_cases(*given, world=options.world, processes=in_processes, page_size=page_size)
            steps.begin(f"{layout}: Transformers alone")
            place = {"layout": layout, "world": options.world, "processes": in_processes, "device": device.type}
            runs += [{**place, **verdict} for verdict in judge_cases(model, layout, cases, sharded, unsharded)]
    return runs


def _print_layout(world: int, layout: str, runs: list[dict]) -> None:
    columns = (
        "case",
        ">prompts",
        "chunks",
        "tokens equal",
        ">from 1",
        ">from T",
        ">beyond",
        ">selected alike",
        ">KiB moved / ordinary",
    )
    rows = [
        (
            run["case"],
            _prompts(run),
            _paths(run["chunks"]),
            _equality(run),
            f"{run['unsharded_max_logit_diff']:.0e}",
            f"{run['max_logit_diff']:.0e}",
            f"{run['unsharded_rows_beyond']}, {run['rows_beyond']}",
            f"{run['selections'] - run['other_selections']:,} of {run['selections']:,}",
            _moved(run["chunks"]),
        )
        for run in runs
    ]
    print()
    bound = runs[0]["logit_limit"]
    print_table(f"{layout}: chunked prefill over {world} rank(s); logits may differ by {bound:g}", columns, rows)
    candidates = sum(chunk["candidate_bytes"] for run in runs for chunk in run["chunks"])
    print(f"Either way candidates of the selection travel besides: {candidates / KIB:,.0f} KiB.")


def _prompts(run: dict) -> str:
    prefix = f"{run['prefix']:,} + " if run["prefix"] else ""
    return prefix + ", ".join(f"{length - run['prefix']:,}" for length in run["prompts"])


def _paths(chunks: list[dict]) -> str:
    """How many chunks went which way, and why not by the gather."""
    ways = collections.Counter((chunk["path"], chunk["reason"]) for chunk in chunks)
    return ", ".join(
        f"{count} {path}" + ("" if path == "gather" else f" ({reason})") for (path, reason), count in ways.items()
    )


def _moved(chunks: list[dict]) -> str:
    """What a rank received, and what it would have received if no chunk had gathered."""
    moved = sum(chunk["gather_bytes" if chunk["path"] == "gather" else "ordinary_bytes"] for chunk in chunks)
    ordinary = sum(chunk["ordinary_bytes"] for chunk in chunks)
    return f"{moved / KIB:,.0f} / {ordinary / KIB:,.0f}"


def _equality(run: dict) -> str:
    """Generated tokens that equal those of one rank, and those of Transformers."""
    count = sum(map(len, run["tokens"]))
    ours = [token for tokens in run["tokens"] for token in tokens]

    def equal(others: list[list[int]]) -> int:
        return sum(a == b for a, b in zip(ours, (token for tokens in others for token in tokens), strict=True))

    return f"{equal(run['unsharded_tokens'])}, {equal(run['oracle_tokens'])} of {count}"


def _print_verdict(runs: list[dict]) -> int:
    faults = processes.faults_of_all_ranks(
        [f"{run['layout']}, {run['case']}: {fault}" for run in runs for fault in run["faults"]]
    )
    for fault in faults:
        print(f"FAILED {fault}")
    passed = sum(not run["faults"] for run in runs)
    print(f"\n{passed} of {len(runs)} cases passed")
    return 1 if faults else 0
