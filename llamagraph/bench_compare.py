"""Whether graphs pay: what a token's time consists of in each mode, and what to use.

Plain data in, plain data and sentences out; `bench_anatomy.py` measures. Knows no device.

A token's time is cut in three. *Busy*: the device computes. *Gaps*: what so many launches cost the
device at least, as do-nothing launches in a graph take that long. *Waits*: the rest, in which it
waits for the host, or for one graph to follow another. Busy is the same in all modes, for they run
the same kernels: the time of a step as one graph, by the device's clock, without the gaps.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from llamagraph.bench_result import Result

HOST_AHEAD = 0.95  # of a token's time: where launching takes less, the device is what takes it
LEAST_GAIN = 0.01  # of a token's time; below it nobody notices, whatever the samples say


@dataclass(frozen=True)
class Timed:
    """A launch in its place within a step: its time with the gap before it, and what it moves."""

    label: str
    kernel: str
    ns: float
    n_bytes: int


@dataclass(frozen=True)
class Anatomy:
    """What a decode step consists of on a device, whoever launches it.

    `step_ns` is a whole step as one graph behind others, by the device's clock; `gap_ns` a launch
    that does nothing. Of the host's time for a launch, `driver_ns` are the driver's own and
    `python_ns` the bindings' (None where there is no driver).
    """

    n_launches: int
    step_ns: float
    gap_ns: float
    driver_ns: float | None = None
    python_ns: float | None = None
    timeline: tuple[Timed, ...] = ()

    @property
    def gaps_ns(self) -> float:
        return self.n_launches * self.gap_ns

    @property
    def busy_ns(self) -> float:
        return max(0.0, self.step_ns - self.gaps_ns)


@dataclass(frozen=True)
class Compared(Result):
    """A result with the parts of a token's time in it, their sum `token_ns`.

    `launches_saved` counts a token's, against the stream; after `pays_after` tokens the graphs'
    making has been paid for by what they save (-1: never).
    """

    token_ns: float
    busy_ns: float
    gaps_ns: float
    waits_ns: float
    launches_saved: int
    pays_after: int


@dataclass(frozen=True)
class Comparison:
    """A case in several modes, the stream first."""

    rows: tuple[Compared, ...]
    anatomy: Anatomy

    @property
    def stream(self) -> Compared:
        return self.rows[0]

    def row(self, mode: str) -> Compared:
        return next(r for r in self.rows if r.graph_mode == mode)


def compare(results: Sequence[Result], anatomy: Anatomy) -> Comparison:
    """The comparison of a decode case. Of several results in a mode the first counts: modes that
    the device refuses have run as another.
    """
    by_mode = {r.graph_mode: r for r in reversed(results)}
    ordered = sorted(by_mode.values(), key=results.index)
    stream = by_mode["stream"]
    ordered.sort(key=lambda r: r is not stream)  # a stable sort: the stream goes first
    return Comparison(tuple(_compared(r, stream, anatomy) for r in ordered), anatomy)


def _compared(result: Result, stream: Result, anatomy: Anatomy) -> Compared:
    token = _token_ns(result)
    busy = min(anatomy.busy_ns, token)  # launches side by side may take less than one by one
    gaps = min(anatomy.gaps_ns, token - busy)
    saved = _token_ns(stream) - token
    gains = saved > 0 and _differ(stream, result)
    return Compared(**asdict(result), token_ns=token, busy_ns=busy, gaps_ns=gaps,
                    waits_ns=token - busy - gaps,
                    pays_after=math.ceil(1e6 * result.prepare_ms / saved) if gains else -1,
                    launches_saved=round(stream.n_queued - result.n_queued))


def _token_ns(result: Result) -> float:
    return result.avg_ns / result.n_gen


def _differ(a: Result, b: Result) -> bool:
    """Whether two modes' times differ by more than they scatter, and by what anyone notices."""
    apart, least = abs(a.avg_ns - b.avg_ns), LEAST_GAIN * min(a.avg_ns, b.avg_ns)
    return apart > max(least, math.hypot(a.stddev_ns, b.stddev_ns))


def choice(comparisons: Sequence[Comparison]) -> str:
    """The mode to use for the cases: the simplest one that no other beats.

    Modes stand in the order of their simplicity; what counts is the sum of a token's times.
    """
    modes = [r.graph_mode for r in comparisons[0].rows]
    total = {m: sum(c.row(m).token_ns for c in comparisons) for m in modes}
    best = min(modes, key=lambda m: total[m])
    return next(m for m in modes if m == best or total[m] <= (1 + LEAST_GAIN) * total[best]
                or not any(_differ(c.row(m), c.row(best)) for c in comparisons))


def verdict(comparisons: Sequence[Comparison]) -> list[str]:
    """What to use for a model here, in sentences: cases of one model, on one machine."""
    mode, first = choice(comparisons), comparisons[0]
    lines = [_advice(mode, comparisons)]
    if mode != "stream":
        lines.append(_price(mode, comparisons))
    lines += [_where_it_goes(c, mode) for c in comparisons]
    if first.anatomy.driver_ns is not None:
        lines.append(_language(first, mode))
    return lines + _losses(comparisons)


def _advice(mode: str, comparisons: Sequence[Comparison]) -> str:
    if mode == "stream":
        return "Use stream: no graph is faster here by more than the times scatter."
    gains = [c.stream.token_ns / c.row(mode).token_ns for c in comparisons]
    most = "" if len(gains) == 1 else f" to {max(gains):.2f}"
    return f"Use {mode}: {min(gains):.2f}{most} times the stream's speed."


def _price(mode: str, comparisons: Sequence[Comparison]) -> str:
    """Of the case that takes longest to pay. The driver takes memory in large pieces, so that the
    first graphs of a model may have what others then find.
    """
    rows = [c.row(mode) for c in comparisons]
    row = max(rows, key=lambda r: r.pays_after if r.pays_after >= 0 else math.inf)
    memory = max(r.graph_bytes for r in rows)
    paid = (f"paid for after {row.pays_after} tokens" if row.pays_after >= 0
            else f"not paid for at {row.name}, where it gains nothing")
    n_launches = comparisons[rows.index(row)].stream.n_launches
    taken = f"{memory / 1e6:.1f} MB" if memory else "no memory that was not the driver's before"
    return (f"It saves {row.launches_saved} of {n_launches} launches a token; making it takes "
            f"{row.prepare_ms:.1f} ms and {taken}, {paid}.")


def _where_it_goes(c: Comparison, mode: str) -> str:
    """A stream's token, beside one in the mode, or beside the best graph where that is none."""
    other = c.row(mode) if mode != "stream" else min(c.rows[1:] or c.rows, key=lambda r: r.token_ns)
    s, us = c.stream, (lambda ns: f"{ns / 1e3:.0f} us")
    return (f"{s.name}: of the stream's {us(s.token_ns)} a token the device computes for "
            f"{us(s.busy_ns)}, {s.n_launches} launches cost it {us(s.gaps_ns)}, and "
            f"{us(s.waits_ns)} it waits; with {other.graph_mode} {us(other.token_ns)}, of which it "
            f"waits {us(other.waits_ns)}.")


def _language(c: Comparison, mode: str) -> str:
    """What is Python's share of the launches, and what a C program would be left with.

    Where the host is done long before the device, its language makes no difference.
    """
    a, us, token = c.anatomy, c.stream.host_us_per_token, c.stream.token_ns / 1e3
    assert a.driver_ns is not None
    own = a.n_launches * a.driver_ns / 1e3
    cost = (f"{c.stream.name}: launching costs the host {us:.0f} us a token from Python, {own:.0f} "
            f"us of them the driver's own ({a.driver_ns / 1e3:.1f} us a launch)")
    if us < HOST_AHEAD * token:
        return (f"{cost}; the device takes {token:.0f} us for what it is launched, so a stream "
                f"launched from C would be no faster.")
    bound = max(own, a.step_ns / 1e3)
    return (f"{cost}: a stream launched from C would take at least {bound:.0f} us a token, {mode} "
            f"takes {c.row(mode).token_ns / 1e3:.0f} us.")


def _losses(comparisons: Sequence[Comparison]) -> list[str]:
    """The modes that are slower than the stream, and where."""
    lines = []
    for mode in [r.graph_mode for r in comparisons[0].rows[1:]]:
        pairs = [(c.row(mode), c.stream) for c in comparisons]
        worse = [f"{r.name} by {100 * (r.token_ns / s.token_ns - 1):.0f} %" for r, s in pairs
                 if r.token_ns > s.token_ns and _differ(r, s)]
        if worse:
            lines.append(f"{mode} loses against the stream: {', '.join(worse)}.")
    return lines
