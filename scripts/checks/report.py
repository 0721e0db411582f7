"""What was checked and how it went: rows that end in one table. Knows nothing of GPUs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Row:
    area: str
    name: str
    ok: bool
    figure: str


@dataclass
class Report:
    """Rows of checks, and of figures that cannot fail."""

    rows: list[Row] = field(default_factory=list)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if not row.ok]

    def add(self, area: str, name: str, ok: Any, figure: str = "") -> None:
        self.rows.append(Row(area, name, bool(ok), figure))
        print(f"{'ok  ' if ok else 'FAIL'} {area}: {name} {figure}", flush=True)

    @contextmanager
    def check(self, area: str, name: str, timed: bool = True) -> Iterator[None]:
        """A fault inside is a row of its own, and the next check still runs."""
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self.add(area, name, False, f"{type(error).__name__}: {first}")
        else:
            took = time.perf_counter() - started
            if timed:
                print(f"     {area}: {name} took {took:.1f} s", flush=True)

    def table(self) -> str:
        """Failures and figures line by line; what else passed is counted by area."""
        shown = [row for row in self.rows if row.figure or not row.ok]
        width = max((len(f"{row.area}: {row.name}") for row in shown), default=0)
        lines = [f"{'ok  ' if row.ok else 'FAIL'} {f'{row.area}: {row.name}':{width}}  {row.figure}"
                 for row in shown]
        for area in dict.fromkeys(row.area for row in self.rows):
            rows = [row for row in self.rows if row.area == area]
            lines.append(f"{area}: {sum(row.ok for row in rows)} of {len(rows)} passed")
        return "\n".join(lines)
