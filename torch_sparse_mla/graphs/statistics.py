"""What a compiled step did: captures, replays, padding and fallbacks."""

import collections
import dataclasses
from typing import Any


@dataclasses.dataclass
class Statistics:
    """Counters since the step was made.

    Attributes:
        traces: graphs that Dynamo made of the function; pieces: of the last of them, those that are captured and all.
        captures: CUDA graphs by mode ("full": one for each size; "piecewise": one for each piece and size).
        replays: calls served by graphs, by (mode, padded rows).
        calls: calls by mode, those without graphs included.
        live_rows, padded_rows: rows asked for, and rows run, by graphs.
        fallbacks: calls that did not run as the mode asks for, by reason.
        graph_bytes: device memory that the captures took.
    """

    traces: int = 0
    captured_pieces: int = 0
    pieces: int = 0
    captures: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    replays: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    calls: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    live_rows: int = 0
    padded_rows: int = 0
    fallbacks: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    graph_bytes: int = 0

    @property
    def padding_waste(self) -> float:
        """Share of the rows run by graphs that nobody asked for."""
        return 1.0 - self.live_rows / self.padded_rows if self.padded_rows else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for logs and JSON."""
        return {
            "traces": self.traces,
            "pieces": self.pieces,
            "captured_pieces": self.captured_pieces,
            "captures": dict(self.captures),
            "replays": {f"{mode}, {rows} rows": count for (mode, rows), count in sorted(self.replays.items())},
            "calls": dict(self.calls),
            "live_rows": self.live_rows,
            "padded_rows": self.padded_rows,
            "padding_waste": self.padding_waste,
            "fallbacks": dict(self.fallbacks),
            "graph_bytes": self.graph_bytes,
        }
