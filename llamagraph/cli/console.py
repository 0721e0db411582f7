"""What goes to the terminal besides the answer: facts and progress, on stderr."""

import io
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from llamagraph.errors import LlamaGraphError

BAR_AFTER_SECONDS = 0.7


def prepare_streams() -> None:
    """Closed streams read as empty and swallow what is written; odd characters become "?"."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "r+")))
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def note(text: str) -> None:
    """One line on stderr."""
    click.echo(text, err=True)


def write_page(file: Path, text: str) -> None:
    """Writes a page; ClickException where it cannot be written."""
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise click.ClickException(f"{file}: cannot be written: {error}") from None


def wants_color(choice: str, stream: Any) -> bool:
    """Whether `on`, `off` or `auto` means colours: auto does on a terminal."""
    return choice == "on" or (choice == "auto" and stream.isatty())


class Notes:
    """Lines on stderr, and in a log file, up to a level: 1 errors, 2 warnings, 3 facts, 4 all."""

    def __init__(self, level: int = 3, file: Path | None = None, color: bool = False):
        self._level, self._color = level, color
        try:
            self._file = file.open("w", encoding="utf-8", errors="replace") if file else None
        except OSError as error:
            raise click.ClickException(f"{file}: cannot be written: {error}") from None

    def __call__(self, text: str, level: int = 3) -> None:
        if level > self._level:
            return
        shown = click.style(text, fg="yellow" if level < 3 else None, dim=level > 2)
        click.echo(shown if self._color else text, err=True, color=self._color)
        if self._file:
            self._file.write(f"{text}\n")

    def warn(self, text: str) -> None:
        self(text, 2)

    def detail(self, text: str) -> None:
        self(text, 4)

    def __enter__(self) -> "Notes":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._file:
            if isinstance(error, LlamaGraphError | click.ClickException):
                self._file.write(f"Error: {error}\n")
            self._file.close()


class ProgressBar:
    """A bar with bytes and rate, only on a terminal and only for what takes a while."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._label, self._task, self._since = "", None, 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        if label != self._label:
            self.close()
            self._label, self._since = label, time.monotonic()
        if self._bar is None and done < total:
            if time.monotonic() - self._since < BAR_AFTER_SECONDS:
                return
            self._open(label, total)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            if done >= total:
                self.close()

    def _open(self, label: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

        self._bar = Progress("{task.description}", BarColumn(), DownloadColumn(),
                             TransferSpeedColumn(), console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(label, total=total)
        self._bar.start()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the bar away; the terminal is then as before."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def end_stdout() -> None:
    """Nothing more is written: the reader sees the end now, not once the device is closed.

    Where the reader has gone before, the exit is quiet.
    """
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    drop_stdout()


def drop_stdout() -> None:
    """What is still to be written, and all that comes, goes nowhere."""
    with suppress(io.UnsupportedOperation):  # not a file of the system
        number, null = sys.stdout.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
