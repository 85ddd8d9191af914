"""Six ways in which prefills meet an engine, run over ranks, over one rank, and judged. Used by `demo --prefill`.

    prompts -> chunks of all requests together -> (prefix kept for others) -> greedy decode steps by ordinary DCP

The cases are those of the published measurement (256 tokens; chunked 32,768; two concurrent; two that share 30,720),
scaled to a top-k of 64 instead of 2,048, and two that have broken engines: a prefix hit of a later request, and ranks
that own nothing. They run one after another on one client, so that later ones use the pages that earlier ones left.

Each is judged twice, row by row: against the same client with one rank; and against Transformers alone on equally
rounded latents, which sees every sequence whole. Of the latter first which tokens its indexers select, as sets; then
what the model makes of the tokens that the operators selected, and of the experts that were chosen with them. For where
two scores all but tie, rounding decides, and a row that chose otherwise has other logits without any fault.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer, Glm5NextTextTopkRouter

from ..integrations import transformers as integration
from ..integrations.prefill_pages import Prefix, Request
from ..integrations.sharded_prefill import PrefillClient
from .generation import first_difference, forward, judge

# Rows of a chunk, over all its requests: no multiple of 4, so that pools stay open between chunks.
CHUNK_ROWS = 130
LONG, CONCURRENT = 390, (250, 190)
# Behind the shared prefix. So few rows after so long a prefix as those of the later request cost less the ordinary way.
SHARING, LATER = (60, 45), 11
# Prompts that lie within the first run of tokens belong to the first rank alone.
SHORT, TINY = 8, (4, 3, 2)
MAX_REQUESTS = 3
# Near ties: so many selections may be others than those of Transformers, and one in any case.
SELECTIONS_EXCUSED = 0.01
# And so many rows may differ by more from those of one rank, which chooses for itself.
ROWS_EXCUSED = 0.01
# What modules that choose have given, in the order of the calls: a top-k list; logits, weights and numbers of experts.
Choices = list[tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """Prompts that are served together. `prefix`: tokens that all of them begin with, kept for all who come later."""

    name: str
    prompts: list[torch.Tensor]
    prefix: int = 0

    @property
    def longest(self) -> int:
        return max(len(prompt) for prompt in self.prompts)


@dataclass
class Served:
    """What a client computed of a request, chunk by chunk.

    Attributes:
        logits: [rows, vocabulary] each.
        choices: of the same rows, each.
        tokens: that were generated; their logits are the last rows.
    """

    logits: list[torch.Tensor] = field(default_factory=list)
    choices: list[Choices] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def all_logits(self) -> torch.Tensor:
        return torch.cat(self.logits).float()

    @property
    def all_choices(self) -> Choices:
        of_modules = zip(*self.choices, strict=True)
        return [tuple(map(torch.cat, zip(*chunks, strict=True))) for chunks in of_modules]


@dataclass
class CaseRun:
    """Of each prompt what lies behind its prefix; of the prefix what was computed, unless it was there already."""

    served: list[Served]
    prefix: Served | None
    reports: list[dict]


def make_cases(text: torch.Tensor, unit: int) -> list[Case]:
    """The six cases.

    Args:
        text: tokens to cut prompts from.
        unit: tokens that fill a page on every rank: what a shared prefix is a multiple of.
    """
    parts = iter(_cut(text, [SHORT, LONG, *CONCURRENT, unit, *SHARING, LATER, *TINY]))
    short, long = next(parts), next(parts)
    concurrent = [next(parts), next(parts)]
    prefix = next(parts)
    first, second, later = (torch.cat([prefix, next(parts)]) for _ in range(3))
    return [
        Case("one chunk", [short]),
        Case("several chunks", [long]),
        Case("two concurrent", concurrent),
        Case("shared prefix", [first, second], unit),
        Case("later prefix hit", [later], unit),
        Case("ranks own nothing", list(parts)),
    ]


def text_length(unit: int) -> int:
    return SHORT + LONG + sum(CONCURRENT) + unit + sum(SHARING) + LATER + sum(TINY)


def _cut(text: torch.Tensor, lengths: list[int]) -> Iterator[torch.Tensor]:
    yield from text[: sum(lengths)].split(lengths)


class Server:
    """A client with a prefix cache: what an engine's scheduler does, as far as the cases need it."""

    def __init__(self, client: PrefillClient, count: int) -> None:
        self.client, self.count = client, count
        self.prefixes: dict[tuple[int, ...], Prefix] = {}
        self._chosen: Choices = []
        self._hooks = [module.register_forward_hook(self._note) for module in choosing(client.backbone)]

    def serve(self, case: Case) -> CaseRun:
        """Prefill all prompts in chunks, generate `count` tokens of each, and release the requests."""
        done = len(self.client.reports)
        key = tuple(case.prompts[0][: case.prefix].tolist())
        prefix = self._keep_prefix(case.prompts[0], key) if key and key not in self.prefixes else None
        requests = {self.client.admit(self.prefixes.get(key)): prompt for prompt in case.prompts}
        served = self._prefill(requests)
        self._decode(served)
        for request in requests:
            self.client.release(request)
        return CaseRun(list(served.values()), prefix, self.client.reports[done:])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep_prefix(self, prompt: torch.Tensor, key: tuple[int, ...]) -> Served:
        request = self.client.admit()
        served = self._prefill({request: prompt[: len(key)]})[request]
        self.prefixes[key] = self.client.keep_prefix(request)
        self.client.release(request)
        return served

    def _prefill(self, requests: dict[Request, torch.Tensor]) -> dict[Request, Served]:
        served = {request: Served() for request in requests}
        while waiting := [request for request in requests if request.length < len(requests[request])]:
            share = CHUNK_ROWS // len(waiting)
            self._forward({request: requests[request][request.length :][:share] for request in waiting}, served)
        return served

    def _decode(self, served: dict[Request, Served]) -> None:
        for step in range(self.count):
            for one in served.values():
                one.tokens.append(int(one.logits[-1][-1].argmax()))
            if step < self.count - 1:
                self._forward({request: one.tokens[-1:] for request, one in served.items()}, served, decode=True)

    def _forward(self, batch: dict, served: dict[Request, Served], decode: bool = False) -> None:
        self._chosen.clear()
        logits = self.client.forward(batch, decode=decode)
        start = 0
        for request, rows in logits.items():
            end = start + len(rows)
            served[request].logits.append(rows)
            served[request].choices.append([tuple(part[start:end] for part in choice) for choice in self._chosen])
            start = end

    def _note(self, module: torch.nn.Module, args: tuple, output: torch.Tensor | tuple) -> None:
        self._chosen.append(output if isinstance(output, tuple) else (output,))


class Oracle:
    """Transformers alone, on latents rounded as the layout rounds them, and with choices that it is given.

    A shared prefix is computed once.

    Attributes:
        rows, other_rows: rows and Full layers that it has seen, and those where it would have selected other tokens.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.rows = self.other_rows = 0
        self._prefix_cache: object = None

    def prefix_logits(self, tokens: torch.Tensor, served: Served) -> torch.Tensor:
        logits, self._prefix_cache = self._forward(tokens, None, served)
        return logits

    def logits(self, case: Case, prompt: torch.Tensor, served: Served) -> torch.Tensor:
        """[rows, vocabulary] of a prompt from its prefix on, and of the tokens that were generated after it."""
        cache = copy.deepcopy(self._prefix_cache) if case.prefix else None
        generated = torch.tensor(served.tokens[:-1], dtype=prompt.dtype, device=prompt.device)
        return self._forward(torch.cat([prompt[case.prefix :], generated]), cache, served)[0]

    def _forward(self, tokens: torch.Tensor, cache: object, served: Served) -> tuple[torch.Tensor, object]:
        given = iter(served.all_choices)

        def replace(module: torch.nn.Module, args: tuple, own: torch.Tensor | tuple) -> torch.Tensor | tuple:
            choice = next(given)
            if not isinstance(module, Glm5NextTextIndexer):
                return choice
            differs = (own[0].sort(-1).values != choice[0].sort(-1).values).any(-1)
            self.rows += len(differs)
            self.other_rows += int(differs.sum())
            return choice[0][None]

        hooks = [module.register_forward_hook(replace) for module in choosing(self.model)]
        try:
            logits, cache = forward(self.model, tokens[None], cache, keep=len(tokens))
        finally:
            for hook in hooks:
                hook.remove()
        return logits.float(), cache


def choosing(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of a model that choose tokens or experts."""
    return [module for module in model.modules() if isinstance(module, Glm5NextTextIndexer | Glm5NextTextTopkRouter)]


def run_cases(
    model: PreTrainedModel, layout: str, cases: list[Case], count: int, world: int, processes: bool, page_size: int
) -> list[CaseRun]:
    """All cases over `world` ranks, on one client."""
    most = max(case.longest for case in cases) + count
    sizes = {"max_requests": MAX_REQUESTS, "max_len": most, "max_rows": CHUNK_ROWS, "page_size": page_size}
    with PrefillClient(model, layout=layout, world=world, processes=processes, **sizes) as client:
        server = Server(client, count)
        try:
            return [server.serve(case) for case in cases]
        finally:
            server.close()


def judge_cases(
    model: PreTrainedModel, layout: str, cases: list[Case], sharded: list[CaseRun], unsharded: list[CaseRun]
) -> list[dict]:
    """Everything that the demo reports of each case; "faults" is empty where all is well."""
    exact = model.dtype == torch.float32
    integration.fake_quantise(model, layout)
    try:
        oracle = Oracle(model)
        runs = zip(cases, sharded, unsharded, strict=True)
        return [_judge_case(oracle, layout, exact, *run) for run in runs]
    finally:
        integration.restore(model)


def _judge_case(oracle: Oracle, layout: str, exact: bool, case: Case, run: CaseRun, alone: CaseRun) -> dict:
    oracle.rows = oracle.other_rows = 0
    by_oracle, by_one_rank = [], []
    if run.prefix is not None:
        expected = oracle.prefix_logits(case.prompts[0][: case.prefix], run.prefix)
        by_oracle.append(judge(layout, [], run.prefix.all_logits, expected, exact))
        by_one_rank.append(_by_one_rank(layout, exact, run.prefix, alone.prefix))
    for prompt, served, other in zip(case.prompts, run.served, alone.served, strict=True):
        expected = oracle.logits(case, prompt, served)
        by_oracle.append(judge(layout, served.tokens, served.all_logits, expected, exact))
        by_one_rank.append(_by_one_rank(layout, exact, served, other))
    prefill = [report for report in run.reports if report["reason"] != "decode_tokens"]
    return {
        "case": case.name,
        "prompts": [len(prompt) for prompt in case.prompts],
        "prefix": case.prefix,
        "tokens": [served.tokens for served in run.served],
        "unsharded_tokens": [served.tokens for served in alone.served],
        "oracle_tokens": [verdict["oracle_tokens"] for verdict in by_oracle if verdict["oracle_tokens"]],
        "logit_limit": by_oracle[0]["logit_limit"],
        **_worst("", by_oracle),
        **_worst("unsharded_", by_one_rank),
        "selections": oracle.rows,
        "other_selections": oracle.other_rows,
        "chunks": prefill,
        "decode_steps": len(run.reports) - len(prefill),
        "faults": _faults(oracle, by_oracle, by_one_rank),
    }


def _by_one_rank(layout: str, exact: bool, served: Served, alone: Served) -> dict:
    """The verdict of one rank, up to a token that differs: behind it nothing is comparable."""
    first = first_difference(served.tokens, alone.tokens)
    count = len(served.tokens) if first is None else first + 1
    logits, expected = served.all_logits, alone.all_logits
    rows = len(logits) - len(served.tokens) + count
    excused = _excused(rows, ROWS_EXCUSED)
    return judge(layout, served.tokens[:count], logits[:rows], expected[:rows], exact, excused=excused)


def _faults(oracle: Oracle, by_oracle: list[dict], by_one_rank: list[dict]) -> list[str]:
    faults = [fault for verdict in by_oracle for fault in verdict["faults"]]
    for verdict in by_one_rank:
        faults += [f"against one rank: {fault.replace('Transformers', 'that')}" for fault in verdict["faults"]]
    excused = _excused(oracle.rows, SELECTIONS_EXCUSED)
    if oracle.other_rows > excused:
        faults.append(f"{oracle.other_rows} of {oracle.rows} selections differ from Transformers'; allowed {excused}")
    return faults


def _worst(prefix: str, verdicts: list[dict]) -> dict:
    differences = torch.tensor([verdict["max_logit_diff"] for verdict in verdicts], dtype=torch.float64)
    # Unlike Python's, this maximum keeps NaN.
    found = {"max_logit_diff": float(differences.max()), "rows_beyond": sum(v["rows_beyond"] for v in verdicts)}
    return {prefix + name: value for name, value in found.items()}


def _excused(rows: int, share: float) -> int:
    return max(int(share * rows), 1)
