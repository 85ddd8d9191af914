"""Tables and progress on the terminal, with rich; tables also as plain text where rich is not installed."""

import sys
import time
from collections.abc import Sequence

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text
except ImportError:
    Console = Table = Text = None

# A pipe or a log file has no width of its own; rich would assume 80 columns and break every row.
WIDTH_WITHOUT_TERMINAL = 140
NEVER_WRAPPED = ("layout", "operator", "tokens", "tokens equal")


def console() -> "Console":
    """A rich console on standard output."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text under a title; a column whose name starts with '>' is aligned to the right."""
    names = [name.removeprefix(">") for name in columns]
    if Console is None:
        print(f"\n{title}")
        widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(names))]
        for row in [names, *rows]:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for name, column in zip(names, columns, strict=True):
        table.add_column(name, justify="right" if column.startswith(">") else "left", no_wrap=name in NEVER_WRAPPED)
    for row in rows:
        # As Text, so that brackets in an error message are not taken for markup.
        table.add_row(*(Text(cell) for cell in row))
    console().print(table)


class Steps:
    """Progress over a known number of steps: a bar on a terminal, and elsewhere a line as each step begins."""

    def __init__(self, total: int) -> None:
        self._console = console()
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("", total=total)
        self._total = total
        self._begun = 0
        self._started = time.monotonic()

    def begin(self, title: str) -> None:
        """Close the step before, if any, and name the one that starts."""
        self._bar.update(self._task, completed=self._begun, description=title)
        self._begun += 1
        if not self._console.is_terminal:
            elapsed = time.monotonic() - self._started
            print(f"{elapsed:6.1f} s  {self._begun}/{self._total}  {title}", flush=True)

    def __enter__(self) -> "Steps":
        self._bar.start()
        return self

    def __exit__(self, error_type: type | None, *_: object) -> None:
        if error_type is None:
            self._bar.update(self._task, completed=self._total, description="done")
        self._bar.stop()
