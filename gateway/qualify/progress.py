"""What an operator sees while a qualification runs.

Owns: a progress display for terminals, and plain lines for everything else. Promises: both go to standard error, so that
standard output holds the result alone. Talks to: rich.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Display(Protocol):
    """A progress display that is open for the length of a block."""

    def stage(self, text: str, total: int | None) -> None: ...
    def advance(self) -> None: ...
    def note(self, text: str) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Bars:
    """A bar for each stage, on a terminal."""

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._finish()
        self._progress.stop()

    def stage(self, text: str, total: int | None) -> None:
        """A new bar; the one before is complete."""
        self._finish()
        self._task = self._progress.add_task(text, total=total)

    def advance(self) -> None:
        """One request more."""
        if self._task is not None:
            self._progress.advance(self._task)

    def note(self, text: str) -> None:
        """A line above the bars."""
        self._progress.console.print(text, highlight=False, markup=False)

    def _finish(self) -> None:
        if self._task is not None:
            task = self._progress.tasks[self._task]
            self._progress.update(self._task, total=max(task.completed, 1), completed=max(task.completed, 1))
            self._progress.stop_task(self._task)


class Lines:
    """One line for each stage, where there is no terminal."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def stage(self, text: str, total: int | None) -> None:
        """A stage begins."""
        self.note(text if total is None else f"{text}: {total} requests")

    def advance(self) -> None:
        """Single requests are not told."""

    def note(self, text: str) -> None:
        """One line."""
        print(text, file=sys.stderr, flush=True)


def display() -> Display:
    """Bars on a terminal, else lines."""
    console = Console(stderr=True)
    return Bars(console) if console.is_terminal else Lines()
