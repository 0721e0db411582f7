"""llamagraph bench: how fast a model runs here, by graph mode; a table or JSON on stdout."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click

from llamagraph.cli.console import ProgressBar, end_stdout, note
from llamagraph.cli.options import MODES, place_options, show_version

MOST_VALUES = 1000  # of one option


class Plan(NamedTuple):
    """What is measured where -p, -n, -r and --graph-mode do not say it."""

    n_prompt: Sequence[int]
    n_gen: Sequence[int]
    repetitions: int
    modes: Sequence[str]


GPU_PLAN = Plan([512], [128], 5, ["stream", "capture"])
CPU_PLAN = Plan([64], [16], 2, ["stream"])  # numpy is slower by orders of magnitude


def read_numbers(texts: tuple[str, ...]) -> list[int]:
    """Numbers, lists and ranges: 512, 1,2,4, 0-8192+4096 (steps of 4096), 1-8*2 (doubling)."""
    values: list[int] = []
    for text in ",".join(texts).split(",") if texts else ():
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?", text)
        if match is None:
            raise click.BadParameter(f"{text!r} is not N, FIRST-LAST, FIRST-LAST+STEP or "
                                     f"FIRST-LAST*FACTOR")
        values += _range(text, int(match[1]), int(match[2] or match[1]), match[3], match[4])
    return values


def _range(text: str, first: int, last: int, sign: str | None, number: str | None) -> list[int]:
    step = int(number or 1)
    if first > last or (sign == "*" and (step < 2 or first == 0)) or step == 0:
        raise click.BadParameter(f"the range {text!r} does not reach its end")
    values = [first]
    while (following := values[-1] * step if sign == "*" else values[-1] + step) <= last:
        values.append(following)
        if len(values) > MOST_VALUES:
            raise click.BadParameter(f"{text!r} has over {MOST_VALUES} values; take larger steps")
    return values


def read_pairs(texts: tuple[str, ...]) -> list[tuple[int, int]]:
    pairs = []
    for text in texts:
        match = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text)
        if match is None:
            raise click.BadParameter(f"{text!r} is not PROMPT,GENERATED as in 512,128")
        pairs.append((int(match[1]), int(match[2])))
    return pairs


def read_modes(text: str | None) -> list[str]:
    modes = text.split(",") if text else []
    if wrong := [m for m in modes if m not in MODES]:
        raise click.BadParameter(f"{wrong[0]!r} is none of {', '.join(MODES)}")
    return modes


def numbers_option(*names: str, help: str) -> Callable:
    return click.option(*names, multiple=True, metavar="N,...", help=help,
                        callback=lambda *a: read_numbers(a[2]))


@click.command()
@click.option("-m", "--model", type=click.Path(path_type=Path), metavar="FILE",
              help="GGUF model file. Without it the default model is fetched once.")
@click.option("--synthetic", metavar="SHAPE:QUANT",
              help="Random weights in a real model's shape instead of a file, as in 8b:q4_k_m; "
                   "shapes: 135m, 1b, 8b, 70b.")
@numbers_option("-p", "--n-prompt", help="Prompt lengths (512; on a CPU 64); 0 for none. "
                                         "Lists: 1,2,4; ranges: 0-8192+4096, 1-8*2.")
@numbers_option("-n", "--n-gen", help="Tokens to decode (128; on a CPU 16); 0 for none.")
@click.option("-pg", "pairs", multiple=True, metavar="P,N", callback=lambda *a: read_pairs(a[2]),
              help="A prompt and tokens after it, measured together.")
@numbers_option("-d", "--n-depth", help="Positions that are in the KV cache before (0).")
@click.option("-r", "--repetitions", type=click.IntRange(min=1),
              help="Measurements of each case (5; on a CPU 2).")
@click.option("--graph-mode", "modes", metavar="LIST", callback=lambda *a: read_modes(a[2]),
              help="Some of stream, capture, build, partial, loop (stream,capture; on a CPU "
                   "stream).")
@click.option("-c", "--ctx-size", "n_ctx", type=click.IntRange(min=0), default=0,
              help="Longest sequence in tokens; 0 takes what the cases need.")
@click.option("-o", "--output", type=click.Choice(["md", "json"]), default="md",
              show_default=True, help="What stdout is.")
@click.option("--offline", is_flag=True, help="Never fetch anything.")
@place_options
@show_version
def bench(**options: Any) -> None:
    """Measure prompt and decode speed by graph mode, against what memory allows."""
    from llamagraph import bench as benches

    if options["model"] is not None and options["synthetic"] is not None:
        raise click.UsageError("-m and --synthetic name two models; give one")
    with ExitStack() as opened:
        file = opened.enter_context(_open_file(options))
        device = _open_device(options)
        opened.callback(device.close)
        plan = GPU_PLAN if device.target.is_cuda else CPU_PLAN
        plan = Plan(*(options[name] or default for name, default in plan._asdict().items()))
        cases = benches.cases_of(plan.n_prompt, plan.n_gen, options["pairs"],
                                 options["n_depth"] or [0])
        if not cases:
            raise click.UsageError("nothing to measure: -p and -n are 0")
        with ProgressBar() as bar:
            results = benches.bench(
                file, device, cases, plan.modes, plan.repetitions, n_ctx=options["n_ctx"] or None,
                n_threads=getattr(device, "n_threads", None) or 1, progress=bar, warn=note,
            )
            _print(results, options["output"], bar)


def _open_file(options: dict[str, Any]) -> Any:
    if options["synthetic"] is not None:
        from llamagraph.gguf.synthetic import SyntheticFile

        return SyntheticFile(options["synthetic"])
    from llamagraph.gguf import GGUFFile, default_model

    with ProgressBar() as bar:
        return GGUFFile(options["model"] or default_model(options["offline"], bar))


def _open_device(options: dict[str, Any]) -> Any:
    from llamagraph.devices import open_device

    return open_device(options["device"], n_threads=options["threads"],
                       persist=options["l2_persist"] == "auto",
                       arch_tuning=options["arch_tuning"], warn=note)


def _print(results: Iterator[Any], output: str, bar: ProgressBar) -> None:
    """The table's rows as they come, or one JSON list at the end; the machine on stderr."""
    done: list[Any] = []
    try:
        for result in results:
            if not done:
                bar.close()
                note(f"{result.gpu_info or result.cpu_info}: reads {result.read_gb_per_s:.1f} GB/s")
                if output == "md":
                    _print_row([c.name for c in COLUMNS])
                    _print_row([c.rule for c in COLUMNS])
            done.append(result)
            if output == "md":
                _print_row([c.text(result) for c in COLUMNS])
        if output == "json":
            click.echo(json.dumps([asdict(r) for r in done], indent=2))
    except BrokenPipeError:
        end_stdout()


def _print_row(cells: list[str]) -> None:
    fitted = (cell.rjust(c.width) if c.right else cell.ljust(c.width)
              for cell, c in zip(cells, COLUMNS, strict=True))
    click.echo(f"| {' | '.join(fitted)} |")


class Column(NamedTuple):
    """A column of the table; numbers stand at the right."""

    name: str
    width: int
    text: Callable[[Any], str]
    right: bool = True

    @property
    def rule(self) -> str:
        return "-" * (self.width - self.right) + ":" * self.right


def _size(n: float, steps: tuple[tuple[float, str], ...]) -> str:
    unit, name = next(s for s in steps if n >= s[0] or s is steps[-1])
    return f"{n / unit:.2f} {name}"


COLUMNS = (
    Column("model", 30, lambda r: r.model_type, right=False),
    Column("size", 10, lambda r: _size(r.model_size, ((1 << 30, "GiB"), (1 << 20, "MiB")))),
    Column("params", 10, lambda r: _size(r.model_n_params, ((1e9, "B"), (1e6, "M")))),
    Column("backend", 10, lambda r: r.backends, right=False),
    Column("mode", 8, lambda r: r.graph_mode, right=False),
    Column("test", 15, lambda r: r.name),
    Column("t/s", 20, lambda r: f"{r.avg_ts:.2f} ± {r.stddev_ts:.2f}"),
    Column("GB/s", 8, lambda r: f"{r.gb_per_s:.2f}"),
    Column("% floor", 8, lambda r: f"{r.pct_of_floor:.1f}"),
    Column("launches", 8, lambda r: str(r.n_launches)),
    Column("updates", 8, lambda r: str(r.node_updates)),
    Column("prepare ms", 10, lambda r: f"{r.prepare_ms:.2f}"),
)
