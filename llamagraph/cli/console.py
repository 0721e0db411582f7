"""What goes to the terminal besides the answer: facts and progress, on stderr."""

import io
import os
import sys
import time
from typing import Any

import click

BAR_AFTER_SECONDS = 0.7


def prepare_streams() -> None:
    """Closed streams read as empty and swallow what is written; odd characters become "?"."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "r+")))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def note(text: str) -> None:
    """One line on stderr."""
    click.echo(text, err=True)


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


def discard_stdout() -> None:
    """After a reader has gone: nothing more is written, and the exit is quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
