"""`demo`: tiny models with the true MLA geometry, run by Transformers alone and through the operators, side by side.

With --prefill: chunked prefills of one of them over several ranks, in six cases.
"""

import argparse
import importlib.util
import json
import logging
import platform
import sys
import warnings
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import torch

from .. import LAYOUTS, __version__, explain
from . import processes
from .console import Steps, print_table

INSTALL = "run 'pip install \"torch_sparse_mla[transformers]\"'"
MAX_CONTEXT = 65_000
MAX_TOKENS = 512
MAX_WORLD = 16
# Transformers alone takes a second for each token of a long context on a CPU.
REFERENCE_STEPS = 3
SHOWN_TOKENS = 10
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULTS = {"context": [1024, 4096], "tokens": 16, "dtype": "float32"}
TEXT = (
    "A long conversation leaves a long trail of keys and values behind it, and most of that trail does not matter for "
    "the next word. An indexer reads a short key of every token and picks the few records worth reading in full. The "
    "rest stays where it is, compressed, on whichever device owns it. What follows is the work of this package: fetch "
    "the chosen records, and no others, and attend to them. "
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("demo", help="Transformers against the operators", description=__doc__)
    parser.add_argument("--model", action="append", metavar="NAME", help="a tiny model; repeatable; default: all")
    parser.add_argument(
        "--layout", action="append", metavar="NAME", help="a record layout; repeatable; default: all that fit the model"
    )
    parser.add_argument(
        "--context", nargs="+", type=_bounded(2, MAX_CONTEXT), metavar="TOKENS",
        help="context lengths; default: 1024 4096",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=_bounded(1, MAX_TOKENS), help="tokens to generate; default: 16, with --prefill 6"
    )
    parser.add_argument(
        "--prefill", action="store_true",
        help="chunked prefills of glm5_next over W ranks (default 4) in six cases, with gathered records; of the other "
        "options it takes --layout, --tokens, --world, --device, --prompt, --seed, --json",
    )  # fmt: skip
    parser.add_argument(
        "--world", type=_bounded(1, MAX_WORLD), metavar="W",
        help="shard the cache over W ranks in this process, a divisor of the heads; default: 1. Under torchrun the "
        "ranks are its processes",
    )  # fmt: skip
    parser.add_argument(
        "--strategy", action="append", metavar="NAME",
        help="how the ranks decode; repeatable; default: auto for a world of 2 or more",
    )  # fmt: skip
    parser.add_argument(
        "--mode", action="append", metavar="NAME",
        help="eager (default), compile, piecewise or full (both need a GPU); repeatable; all: those that run here",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--dtype", metavar="NAME", help="of the model: float32 (default) or bfloat16")
    parser.add_argument("--prompt", default=TEXT, metavar="TEXT", help="repeated up to the context length")
    parser.add_argument("--seed", type=_bounded(0, 2**31 - 1), default=0, help="of the weights; default: 0")
    parser.add_argument("--json", type=_writable, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--plot", type=_writable, metavar="FILE.png", help="draw time per token against context")
    parser.set_defaults(run=run, parser=parser)


def _bounded(low: int, high: int):
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed: an integer from {low} to {high}")
        return int(text)

    return parse


def _writable(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a file in a directory that exists")
    return path


def run(options: argparse.Namespace) -> int:
    """Run the demo. Returns 1 if a gate fails or a package is missing, else 0; bad options exit with 2."""
    needed = ["transformers", "rich"] + (["matplotlib"] if options.plot else [])
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    if absent:
        print(f"demo needs {', '.join(absent)}: {INSTALL}", file=sys.stderr)
        return 1
    if options.prefill:
        from . import demo_prefill

        demo_prefill.complete(options)
    for name, default in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    device = processes.own_device(_chosen_device(options))
    if options.dtype not in DTYPES:
        _refuse(options, "--dtype", options.dtype, DTYPES)
    options.world = _chosen_world(options)
    work = _planned_work(options)
    modes = _modes(options, work, device)
    with processes.group_of_processes(device) as group, processes.only_rank_0_prints():
        if options.prefill:
            return demo_prefill.run(options, device, work[demo_prefill.MODEL], group)
        return _run_here(options, device, work, modes, group)


def _run_here(
    options: argparse.Namespace,
    device: torch.device,
    work: dict[str, list[str]],
    modes: list[str],
    group: str | None,
) -> int:
    """Run what is planned and print it. Args: group: the processes that do it together, in words; None: this one."""
    shardings, impossible = _shardings(options, device)
    kernel = explain("sparse_ckv_decode", device)
    print(
        f"Random weights of seed {options.seed}, {options.dtype}, on {device_name(device)}; sparse_ckv_decode runs as "
        f"{kernel['kernel']} ({kernel['why']}); PyTorch {torch.__version__}"
    )
    if modes:
        print(
            f"Modes {', '.join(modes)}: a step of fixed shapes by torch_sparse_mla.compile, whose tokens have to be "
            "those of the eager run; for models without linear attention"
        )
    if shardings and group is not None:
        print(f"{options.world} rank(s), each a process with its shard and its share of the heads: {group}")
    elif shardings:
        print(
            f"{options.world} rank(s) in this process take turns on one device, each with its shard and its share of "
            "the heads: their times say nothing about a link"
        )
    for strategy, why in impossible.items():
        print(f"Not run: {strategy}: {why}")
    runs = _run_all(options, work, shardings, modes, device)
    for model in work:
        _print_model(model, [run for run in runs if run["model"] == model])
    first = processes.is_first()
    if options.json and first:
        _write_json(options, device, runs)
    if options.plot and first:
        from .demo_plot import plot

        plot(runs, options.plot, device_name(device))
    return _print_verdict(runs)


def _refuse(options: argparse.Namespace, name: str, given: str, allowed: object) -> None:
    options.parser.error(f"argument {name}: got {given!r}; allowed: {', '.join(allowed)}")


def _chosen_device(options: argparse.Namespace) -> torch.device:
    count = torch.cuda.device_count()
    allowed = ["auto", "cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    if options.device not in allowed:
        _refuse(options, "--device", options.device, allowed)
    if options.device != "auto":
        return torch.device(options.device)
    return torch.device("cuda" if count else "cpu")


def _chosen_world(options: argparse.Namespace) -> int:
    """The ranks: those of the option, or the processes."""
    from ..dcp.contract import STRATEGIES
    from ..integrations.tiny_models import HEADS

    launched = processes.launched_world()
    if launched is not None and options.world not in (None, launched):
        _refuse(options, "--world", str(options.world), [f"{launched}, the processes of torchrun"])
    world = options.world or launched or 1
    if HEADS % world:
        divisors = [str(divisor) for divisor in range(1, HEADS + 1) if HEADS % divisor == 0]
        _refuse(options, "--world" if launched is None else "--nproc-per-node of torchrun", str(world), divisors)
    _named(options, "--strategy", options.strategy, STRATEGIES)
    return world


def _shardings(options: argparse.Namespace, device: torch.device) -> tuple[list, dict[str, str]]:
    """The sharded runs that the options ask for, besides the one with a single shard; and what of "all" cannot run
    here, with the reason. A strategy that is asked for by name and cannot run is refused."""
    from ..dcp.contract import STRATEGIES
    from ..integrations.transformers import Dcp, why_not

    launched = processes.launched_world() is not None
    given = options.strategy or (["auto"] if options.world > 1 or launched else [])
    wanted = _named(options, "--strategy", given, STRATEGIES) if given else []
    runs = [Dcp(options.world, strategy=strategy, processes=launched) for strategy in wanted]
    impossible = {dcp.strategy: why for dcp in runs if (why := why_not(dcp, device)) is not None}
    for strategy, why in impossible.items():
        if strategy in given:
            options.parser.error(f"argument --strategy: got {strategy!r}, which cannot run here: {why}")
    return [dcp for dcp in runs if dcp.strategy not in impossible], impossible


def _modes(options: argparse.Namespace, work: dict[str, list[str]], device: torch.device) -> list[str]:
    """The modes besides eager that the options ask for."""
    from ..integrations.static_step import MODES
    from ..integrations.tiny_models import STATIC

    possible = [mode for mode in MODES if mode == "compile" or device.type == "cuda"]
    named = _named(options, "--mode", options.mode or ["eager"], ["eager", *possible])
    modes = [mode for mode in named if mode in MODES]
    for model in work if modes and options.model and "all" not in options.model else ():
        if model not in STATIC:
            _refuse(options, f"--mode {modes[0]} --model", model, STATIC)
    return modes


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.machine()}, {torch.get_num_threads()} thread(s)"


def _planned_work(options: argparse.Namespace) -> dict[str, list[str]]:
    """The layouts of each model that the options name."""
    from ..integrations import tiny_models
    from ..integrations.transformers import layouts_for

    fitting = {}
    for model in _named(options, "--model", options.model, tiny_models.MODELS):
        with torch.device("meta"):
            fitting[model] = layouts_for(tiny_models.build(model, device="meta"))
    named = _named(options, "--layout", options.layout, LAYOUTS)
    if not options.layout or "all" in options.layout:
        return {model: list(layouts) for model, layouts in fitting.items()}
    for layout in named:
        if not any(layout in layouts for layouts in fitting.values()):
            _refuse(options, "--layout", layout, dict.fromkeys(chain.from_iterable(fitting.values())))
    work = {model: [layout for layout in named if layout in layouts] for model, layouts in fitting.items()}
    return {model: layouts for model, layouts in work.items() if layouts}


def _named(options: argparse.Namespace, option: str, given: list[str] | None, allowed: object) -> list[str]:
    for name in given or []:
        if name != "all" and name not in allowed:
            _refuse(options, option, name, ["all", *allowed])
    if not given or "all" in given:
        return list(allowed)
    return list(dict.fromkeys(given))


def prompt_tokens(text: str, length: int) -> torch.Tensor:
    """The bytes of a text as token numbers [1, length]. Repetitions are numbered: equal ones would tie in the top-k."""
    data = bytearray()
    paragraph = 0
    while len(data) < length:
        paragraph += 1
        # Bytes that are no UTF-8 come from the command line as surrogates.
        data += f"[{paragraph}] {text}".encode(errors="surrogateescape")
    return torch.tensor([list(data[:length])])


def _run_all(
    options: argparse.Namespace, work: dict[str, list[str]], shardings: list, modes: list[str], device: torch.device
) -> list[dict]:
    from transformers.utils import logging as transformers_logging

    from ..integrations import tiny_models
    from .generation import LONGEST_OWN_CONTEXT, measure, transformers_context

    # Notes on optional kernels and renamed arguments, of no use here.
    transformers_logging.set_verbosity(logging.ERROR)
    contexts = sorted(set(options.context))
    static = {model: modes if model in tiny_models.STATIC else [] for model in work}
    total = sum(1 + len(layouts) * (1 + len(shardings) + len(static[model])) for model, layouts in work.items())
    total *= len(contexts)
    runs = []
    with warnings.catch_warnings(), torch.inference_mode(), Steps(total) as steps:
        warnings.simplefilter("ignore")
        for model_name, layouts in work.items():
            model = tiny_models.build(model_name, seed=options.seed, dtype=DTYPES[options.dtype], device=device)
            for length in contexts:
                steps.begin(f"{model_name}, context {length:,}: Transformers alone")
                prompt = prompt_tokens(options.prompt, length).to(device)
                count = options.tokens if length <= LONGEST_OWN_CONTEXT else min(REFERENCE_STEPS, options.tokens)
                context = transformers_context(model, prompt, count)
                for layout in layouts:
                    steps.begin(f"{model_name}, context {length:,}: {layout}")
                    unsharded = measure(model, layout, context, options.tokens)
                    place = {"model": model_name, "layout": layout, "device": device.type, "mode": "eager"}
                    runs.append({**place, **unsharded.result})
                    for dcp in shardings:
                        steps.begin(f"{model_name}, context {length:,}: {layout}, {dcp.world} ranks, {dcp.strategy}")
                        sharded = measure(model, layout, context, options.tokens, dcp, unsharded)
                        runs.append({**place, **sharded.result})
                    for mode in static[model_name]:
                        steps.begin(f"{model_name}, context {length:,}: {layout}, {mode}")
                        compiled = measure(model, layout, context, options.tokens, None, unsharded, mode)
                        runs.append({**place, "mode": mode, **compiled.result})
    return runs


def _print_model(model: str, runs: list[dict]) -> None:
    sharded = any(run["strategy"] != "local" for run in runs)
    in_modes = any(run["mode"] != "eager" for run in runs)
    columns = (
        "layout",
        *(["mode"] if in_modes else []),
        *([">ranks", "strategy"] if sharded else []),
        ">context",
        ">tokens equal",
        ">max diff",
        ">ms/token",
        ">plain ms",
        ">speed-up",
        ">bytes/token",
        # With ranks, the table is wide enough without these.
        *([] if sharded else [">plain bytes", "leaves plain"]),
    )
    rows = [
        (
            run["layout"],
            *([run["mode"]] if in_modes else []),
            *([str(run["world"]), run["strategy"]] if sharded else []),
            f"{run['context']:,}",
            _equality(run),
            f"{run['max_logit_diff']:.0e}",
            f"{run['ms_per_token']:.1f}",
            f"{run['reference_ms_per_token']:.1f}",
            f"{run['speedup']:.0f}x",
            f"{run['record_bytes_per_token']:,}",
            *([] if sharded else [f"{run['reference_bytes_per_token']:,}", _plain_difference(run)]),
        )
        for run in runs
    ]
    print()
    title = f"{model} through the operators, judged by Transformers on equally rounded latents (plain: not rounded)"
    print_table(title, columns, rows)
    plain = {run["context"]: run["plain_tokens"] for run in runs}
    token_rows = [("none", f"{length:,}", "plain Transformers", _shown(tokens)) for length, tokens in plain.items()]
    for run in runs:
        by = "operators" if run["strategy"] == "local" else f"operators, {_ranks(run)}"
        by += "" if run["mode"] == "eager" else f", {run['mode']}"
        token_rows.append((run["layout"], f"{run['context']:,}", by, _shown(run["tokens"])))
        token_rows.append(("", "", "Transformers, rounded", _shown(run["oracle_tokens"])))
    print_table(f"{model}: tokens", ("layout", ">context", "by", "tokens"), token_rows)


def _ranks(run: dict) -> str:
    """Strategy and number of ranks; with auto, what it chose."""
    chosen = "" if run["chosen"] == run["strategy"] else f" (chose {run['chosen']})"
    return f"{run['strategy']}{chosen} over {run['world']}"


def _shown(tokens: list[int]) -> str:
    return " ".join(f"{token:4}" for token in tokens[:SHOWN_TOKENS]) + (" ..." if len(tokens) > SHOWN_TOKENS else "")


def _equality(run: dict) -> str:
    count, first = len(run["tokens"]), run["first_divergence"]
    if first is None:
        return f"{count} of {count}"
    return f"part at {first}"


def _plain_difference(run: dict) -> str:
    first = run["plain_first_divergence"]
    return f"not in {len(run['plain_tokens'])}" if first is None else f"at token {first}"


def _name(run: dict) -> str:
    name = f"{run['model']}, {run['layout']}, context {run['context']}"
    if run["mode"] != "eager":
        return f"{name}, {run['mode']}"
    return name if run["strategy"] == "local" else f"{name}, {_ranks(run)}"


def _print_verdict(runs: list[dict]) -> int:
    own_faults = [f"{_name(run)}: {fault}" for run in runs for fault in run["faults"]]
    faults = processes.faults_of_all_ranks(own_faults)
    longest = max(run["context"] for run in runs)
    speedups = [run["speedup"] for run in runs if run["context"] == longest]
    spread = f"{min(speedups):.0f} to {max(speedups):.0f} times"
    print(f"\nSpeed-up at a context of {longest:,}: {spread} (information: no time fails the demo)")
    for run in runs:
        if not run["tokens_equal"] and not run["faults"]:
            print(
                f"{_name(run)}: token {run['first_divergence']} differs, as it may: there the first token leads the "
                f"second by {run['gap_at_divergence']:.1e}; logits differ by up to {run['max_logit_diff']:.1e}"
            )
    for fault in faults:
        print(f"FAILED {fault}")
    passed = sum(not run["faults"] for run in runs)
    print(f"{passed} of {len(runs)} runs passed")
    return 1 if faults else 0


def _write_json(options: argparse.Namespace, device: torch.device, runs: list[dict]) -> None:
    options.json.write_text(json.dumps({**json_header(options, device), "runs": runs}, indent=2) + "\n")


def json_header(options: argparse.Namespace, device: torch.device) -> dict:
    return {
        "torch_sparse_mla": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": device_name(device),
        "kernel": explain("sparse_ckv_decode", device)["kernel"],
        "dtype": options.dtype,
        "seed": options.seed,
    }
