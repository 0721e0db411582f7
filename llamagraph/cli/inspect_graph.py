"""llamagraph inspect-graph: what a step consists of, on stdout or as a page.

Runs nothing, unless --device is given.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamagraph.cli.bench import open_file
from llamagraph.cli.console import ProgressBar, note, write_page
from llamagraph.cli.lora import chosen_lora, lora_options
from llamagraph.cli.numbers import Number
from llamagraph.cli.options import MODES, arch_tuning, kv_options, persist_option, show_version

if TYPE_CHECKING:
    from llamagraph.inspection import Group, Inspection, Node, Setting
    from llamagraph.inspection_diff import Difference
    from llamagraph.planner import Planner

BANDWIDTHS = {"sm_90a": 4600.0}  # GB/s, as read by the probe of bench
SAMPLERS = ["greedy", "chain", "host"]


@click.command("inspect-graph")
@click.option("-m", "--model", type=click.Path(path_type=Path), metavar="FILE",
              help="GGUF model file. Without it the default model is fetched once.")
@click.option("--synthetic", metavar="SHAPE:QUANT",
              help="A real model's shape instead of a file, as in 8b:q4_k_m.")
@click.option("-c", "--ctx-size", "n_ctx", type=click.IntRange(min=0), default=0,
              help="Longest sequence in tokens; 0 takes the model's own.")
@click.option("--target", metavar="NAME",
              help="Plan for this architecture, numpy or as in sm_90a (the default); needs no GPU.")
@click.option("--device", metavar="NAME",
              help="Load the model there (cpu, cuda, cuda:1), make the graph, hold what the driver "
                   "says of it against the plan, and run the --steps.")
@arch_tuning
@click.option("--rows", type=click.IntRange(min=1), default=1, show_default=True,
              help="Tokens of the step.")
@click.option("--depth", type=click.IntRange(min=0), default=0, show_default=True,
              help="Tokens before them.")
@click.option("--graph-mode", "mode", type=click.Choice(MODES), default="build", show_default=True,
              help="Whose graph: build has the edges that the data asks for.")
@click.option("--sampler", type=click.Choice(SAMPLERS), default="greedy", show_default=True,
              help="How the step chooses a token.")
@persist_option
@click.option("--steps", type=click.IntRange(min=0), default=0,
              help="Count what so many more steps update, each launched by itself.")
@click.option("--bandwidth", type=Number(min=0, min_open=True), metavar="GB/S",
              help="For the floor of the step's time (4600 for sm_90a).")
@click.option("--registers", "with_registers", is_flag=True,
              help="Compile the kernels to see their registers; needs NVRTC, no GPU.")
@click.option("--json", "output", flag_value="json", help="Print JSON.")
@click.option("--dot", "output", flag_value="dot", help="Print Graphviz text.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a page that draws the graph.")
@click.option("--diff", nargs=2, metavar="A B",
              help="Compare two settings, as in: --diff rows=1 rows=8,depth=100,mode=capture")
@click.option("--offline", is_flag=True, help="Never fetch anything.")
@kv_options
@lora_options
@show_version
def inspect_graph(**options: Any) -> None:
    """Show the nodes, edges, bytes and updates of a step's graph."""
    if options["model"] is not None and options["synthetic"] is not None:
        raise click.UsageError("-m and --synthetic name two models; give one")
    if options["target"] and options["device"]:
        raise click.UsageError("--device has a target of its own; leave --target out")
    if options["diff"] and (options["html"] or options["output"] == "dot" or options["device"]):
        raise click.UsageError("--diff gives text or --json, of plans alone")
    from llamagraph.adapters import Adapters
    from llamagraph.inspection import Setting
    from llamagraph.planner import Planner

    setting = Setting(options["rows"], options["depth"], options["mode"], options["sampler"])
    with ExitStack() as opened:
        file = opened.enter_context(open_file(options["model"], options["synthetic"],
                                              options["offline"]))
        adapters = opened.enter_context(Adapters(chosen_lora(options), file, note))
        device = _device(options, opened)
        planner = Planner(file, device.target if device else _target(options),
                          options["n_ctx"] or None, options["type_k"], options["type_v"],
                          adapters)
        if options["diff"]:
            _compare(planner, setting, options)
            return
        inspection = _inspect(planner, setting, options)
        if device:
            from llamagraph.inspection_driver import verify

            with ProgressBar() as bar:
                inspection = verify(file, device, inspection, options["n_ctx"] or None, bar,
                                    types=(options["type_k"], options["type_v"]),
                                    adapters=adapters)
        _show(inspection, file.path.name, options)


def _device(options: Mapping[str, Any], opened: ExitStack) -> Any:
    if options["device"] is None:
        return None
    from llamagraph.devices import open_device

    device = open_device(options["device"], persist=options["l2_persist"] == "auto",
                         arch_tuning=options["arch_tuning"], warn=note)
    opened.callback(device.close)
    return device


def _target(options: Mapping[str, Any]) -> Any:
    from llamagraph.devices.cuda import check_tuning
    from llamagraph.program.target import target_named

    target = target_named(options["target"] or "sm_90a", options["l2_persist"] == "auto")
    if options["arch_tuning"] is None:
        return target
    chosen = target_named(options["arch_tuning"])
    if not target.is_cuda:  # numpy runs any target's list
        return chosen
    check_tuning(chosen, target.name)
    return target.planned_as(chosen)


def _inspect(planner: "Planner", setting: "Setting", options: Mapping[str, Any]) -> "Inspection":
    from llamagraph import inspection
    from llamagraph.inspection_registers import registers

    bandwidth = options["bandwidth"] or BANDWIDTHS.get(planner.target.name)
    counted = registers(planner, setting) if options["with_registers"] else None
    return inspection.inspect(planner, setting, options["steps"],
                              1e9 * bandwidth if bandwidth else None, counted)


def _show(inspection: "Inspection", title: str, options: Mapping[str, Any]) -> None:
    """What --json, --dot or neither asks for; with --html alone only the page is made."""
    from llamagraph.inspection_page import dot, page

    if options["html"]:
        write_page(options["html"], page(inspection, title))
        note(f"wrote {options['html']}")
    if options["output"] == "json":
        click.echo(json.dumps(inspection.as_dict()))
    elif options["output"] == "dot":
        click.echo(dot(inspection, title), nl=False)
    elif not options["html"]:
        click.echo("\n".join(_table(inspection, title)))


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def _table(inspection: "Inspection", title: str) -> list[str]:
    """The nodes, equal layers once, and the totals; "^" is a node outside the layer."""
    from llamagraph.inspection import folded

    t, rows = inspection.totals, list[tuple[str, ...]]([HEADER])
    for group in folded(inspection.nodes):
        if group.layers:
            rows.append((f"blk.{_ranges(group.layers)}: {len(group.layers)} x",))
        rows += [_row(node, group, inspection) for node in group.nodes]
    return [
        f"{title}: {t['rows']} rows behind {t['depth_tokens']} tokens, {t['target']}, "
        f"{t['graph_mode']}", "", *_aligned(rows), "", *_totals(inspection),
    ]


HEADER = ("node", "kernel", "variant", "grid", "block", "shared", "regs", "reads", "writes",
          "after", "first", "updated by", "reason")


def _row(node: "Node", group: "Group", inspection: "Inspection") -> tuple[str, ...]:
    before = [inspection.nodes[j] for j in node.dependencies]
    after = [b.name if b.layer == node.layer else "^" for b in before]
    return (
        ("  " if group.layers else "") + node.name, node.kernel, node.variant,
        "x".join(map(str, node.grid)), str(node.block), str(node.shared or ""),
        str(node.registers or ""), _size(node.bytes_read), _size(node.bytes_written),
        " ".join(dict.fromkeys(after)), "yes" * node.priority, " ".join(node.updated_by),
        node.reason,
    )


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they must be; those that are empty in all rows are left out."""
    body = [row for row in rows[1:] if len(row) > 1]
    kept = [i for i in range(len(HEADER)) if any(row[i] for row in body)]
    widths = [max(len(row[i]) for row in (HEADER, *body)) for i in kept]
    return ["  ".join(row[i].ljust(w) for i, w in zip(kept, widths, strict=True)).rstrip()
            if len(row) > 1 else row[0] for row in rows]


def _ranges(numbers: tuple[int, ...]) -> str:
    """0-3,5,7-9"""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _totals(inspection: "Inspection") -> list[str]:
    t, u = inspection.totals, inspection.updates
    floor = f", at least {t['floor_ms']:.3g} ms" if "floor_ms" in t else ""
    lines = [
        f"{t['nodes']} nodes, {t['edges']} edges, depth {t['depth']}, width {t['width']}, "
        f"{t['graphs']} graphs",
        "kernels: " + ", ".join(f"{n} {name}" for name, n in t["kernels"].items()),
        f"reads {_size(t['bytes_read'])}, writes {_size(t['bytes_written'])}: "
        f"{_size(t['bytes_per_token'])} a token{floor}",
        f"memory: weights {_size(t['weights_bytes'])}, KV {_size(t['kv_bytes'])} of "
        f"{_size(t['kv_bytes_reserved'])} reserved, scratch {_size(t['scratch_bytes'])}, io "
        f"{_size(t['io_bytes'])}, seen by the host {_size(t['mapped_bytes'])}",
    ]
    if loop := t.get("loop"):
        lines.insert(1, f"they are the body of a {loop['node']} node; the handle of its condition "
                        f"is at {loop['handle']}")
    if u.steps:
        lines.append(f"{u.steps} steps{' run' if u.ran else ''}: {u.node_updates} node updates")
        lines += [f"  at KV length {at}: {n} nodes" for at, n in (u.at or {}).items()]
        lines += [f"  at KV length {at}: another program" for at in u.programs]
        lines += [f"  labels: {' '.join(u.labels)}"] if u.labels else []
    if "driver" in t:
        d = t["driver"]
        made = ", ".join(f"{name.removesuffix('_ms')} {ms:.2f} ms"
                         for name, ms in d.items() if name.endswith("_ms"))
        lines += [f"the device's graph is as planned: {d['nodes']} nodes, {d['edges']} edges "
                  f"({d['programmatic_edges']} programmatic), {_size(d['graph_bytes'])}; {made}",
                  "in use: " + ", ".join(f"{name} {_size(n)}"
                                         for name, n in t["memory_bytes"].items())]
        lines += [f"the loop's handle is {h:#x}" for h in d.get("handles", ())]
    return lines


def read_setting(text: str, base: "Setting") -> "Setting":
    """`rows=8,depth=100,mode=capture,sampler=chain`, each of them in place of the option."""
    choices = {"mode": MODES, "sampler": SAMPLERS}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name in ("rows", "depth") and re.fullmatch(r"\d{1,9}", value):
            changed: dict[str, Any] = {name: int(value)}
        elif value in choices.get(name, ()):
            changed = {name: value}
        else:
            raise click.UsageError(f"--diff: {word!r} is none of rows=N, depth=N, "
                                   f"mode={'|'.join(MODES)}, sampler={'|'.join(SAMPLERS)}")
        base = replace(base, **changed)
    return base


def _compare(planner: "Planner", setting: "Setting", options: Mapping[str, Any]) -> None:
    from llamagraph.inspection_diff import compare

    a, b = (_inspect(planner, read_setting(text, setting), options) for text in options["diff"])
    difference = compare(a, b)
    if options["output"] == "json":
        click.echo(json.dumps(difference.as_dict()))
    else:
        click.echo("\n".join(_differences(difference)))


def _differences(d: "Difference") -> list[str]:
    """What layers have in common is said once."""
    lines = [f"{sign} " + " ".join(f"{k}={v}" for k, v in vars(setting).items())
             for sign, setting in (("-", d.a), ("+", d.b))]
    said = Counter(
        [_any_layer(f"- {label}") for label in d.only_a]
        + [_any_layer(f"+ {label}") for label in d.only_b]
        + [_any_layer("\n".join([f"  {label}", *(f"    {k}: {a} -> {b}"
                                                for k, (a, b) in fields.items())]))
           for label, fields in d.changed.items()]
    )
    for text, n in said.items():
        first, *rest = text.split("\n")
        lines += [first + (f"  ({n} layers)" if "blk.*" in first else ""), *rest]
    lines.append(f"topology: {'equal' if d.topology_equal else 'different'}; "
                 f"program: {'the same' if d.same_program else 'another'}; {len(d.changed)} nodes "
                 f"differ")
    lines.append(f"update: {d.update}")
    return lines


def _any_layer(text: str) -> str:
    return re.sub(r"\bblk\.\d+\.", "blk.*.", text)
