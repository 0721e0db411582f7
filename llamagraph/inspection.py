"""What a step consists of, before or without running it: its nodes, edges, bytes and updates.

Reads the planned launches that every executor runs. Returns plain data and prints nothing; knows
no device (`inspection_driver.py` asks one), no page (`inspection_page.py` draws it).
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from llamagraph.errors import LlamaGraphError
from llamagraph.kernels.attention import attention_vars
from llamagraph.planner import ROW_BUCKETS, Planner, step_key
from llamagraph.program import deps
from llamagraph.program.launch import Buffer, Call, Kernel, Launch, Program, StepKey, Work


@dataclass(frozen=True)
class Setting:
    """Which step: `rows` tokens behind `depth` others, as the executor `mode` runs it."""

    rows: int = 1
    depth: int = 0
    mode: str = "build"
    sampler: str = "greedy"

    @property
    def kv_len(self) -> int:
        return self.depth + self.rows


@dataclass(frozen=True)
class Node:
    """A launch. `args` by the kernel's parameter names, a buffer as its name; bytes at the depth.

    `dependencies` are indices of nodes; `updated_by` the variables whose change re-sends the node;
    `part` the graph that holds it, None where it is launched by itself; `l2_window` what of its
    bytes L2 is asked to keep; `priority` is above 0 where it goes before what could run as well.
    """

    label: str
    kernel: str
    variant: str
    reason: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    args: Mapping[str, Any]
    bytes_read: int
    bytes_written: int
    dependencies: tuple[int, ...]
    updated_by: tuple[str, ...]
    stable: bool
    constants: Mapping[str, int | str]
    pdl: bool
    part: int | None
    l2_window: Mapping[str, Any] | None = None
    priority: int = 0
    registers: int | None = None

    @property
    def layer(self) -> int | None:
        """The number in `blk.3.attn_q`; None outside the layers."""
        match = re.match(r"blk\.(\d+)\.", self.label)
        return int(match[1]) if match else None

    @property
    def name(self) -> str:
        """The label within its layer."""
        return re.sub(r"^blk\.\d+\.", "", self.label)

    def as_dict(self) -> dict[str, Any]:
        """Without the registers where nobody asked for them."""
        fields = asdict(self)
        return fields if self.registers is not None else {
            key: value for key, value in fields.items() if key != "registers"
        }


@dataclass(frozen=True)
class Updates:
    """What decoding on changes: the nodes sent anew, how often, and at which KV lengths.

    A step that needs another program takes another executable; its KV length is in `programs`.
    """

    steps: int = 0
    node_updates: int = 0
    labels: tuple[str, ...] = ()
    at: Mapping[int, int] | None = None  # KV length: nodes updated there
    programs: tuple[int, ...] = ()
    ran: bool = False  # on a device; else only planned


@dataclass(frozen=True)
class Inspection:
    """A planned step. `calls` are its launches at the setting, addresses as arena and offset."""

    setting: Setting
    key: StepKey
    nodes: tuple[Node, ...]
    calls: tuple[Call, ...]
    totals: Mapping[str, Any]
    updates: Updates

    @property
    def edges(self) -> list[tuple[int, int]]:
        return [(j, i) for i, node in enumerate(self.nodes) for j in node.dependencies]

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "nodes": [node.as_dict() for node in self.nodes],
            "edges": [list(edge) for edge in self.edges],
            "totals": dict(self.totals),
            "updates": {name: getattr(self.updates, name)
                        for name in ("steps", "node_updates", "labels")},
        }


def place(buffer: Buffer) -> str:
    """What stands for an address before there is any memory."""
    return f"{buffer.arena}+{buffer.start}"


def parts(launches: Sequence[Launch], mode: str) -> list[int | None]:
    """The graph of each launch: none in a stream, and none for an unstable one in `partial`."""
    if mode == "stream":
        return [None] * len(launches)
    if mode != "partial":
        return [0] * len(launches)
    runs = groupby(launches, key=lambda launch: launch.stable)
    found, number = [], 0
    for stable, run in runs:
        found += [number if stable else None for _ in run]
        number += stable
    return found


def edges(launches: Sequence[Launch], mode: str) -> list[list[int]]:
    """The launches before each: those that hazards name, or the one before in a stream."""
    if mode in ("build", "loop"):
        return deps.dependencies(launches)
    return [[i - 1] if i else [] for i in range(len(launches))]


def priorities(program: Program, mode: str) -> list[int]:
    """Which nodes are preferred: only a graph that is built has more than one order."""
    launches = program.launches
    if mode not in ("build", "loop"):
        return [0] * len(launches)
    return deps.priorities(launches, deps.dependencies(launches), program.key.rows)


def inspect(planner: Planner, setting: Setting, steps: int = 0, bandwidth: float | None = None,
            registers: Mapping[Kernel, int] | None = None) -> Inspection:
    """A step of the planner's model, and what `steps` more like it would update.

    `bandwidth` in bytes a second gives the floor of its time. LlamaGraphError where the step does
    not fit the context or any row bucket.
    """
    _check(planner, setting, steps)
    program = planned(planner, setting)
    vars = attention_vars(planner.target, setting.kv_len)
    before = edges(program.launches, setting.mode)
    nodes = tuple(
        replace(_node(launch, vars, setting), dependencies=tuple(b), part=part, priority=priority,
                registers=(registers or {}).get(launch.kernel))
        for launch, b, part, priority in zip(
            program.launches, before, parts(program.launches, setting.mode),
            priorities(program, setting.mode), strict=True)
    )
    calls = tuple(launch.resolve(vars, place) for launch in program.launches)
    totals = _totals(planner, program, setting, nodes, bandwidth)
    return Inspection(setting, program.key, nodes, calls, totals, walk(planner, setting, steps))


def _check(planner: Planner, setting: Setting, steps: int) -> None:
    if not 1 <= setting.rows <= ROW_BUCKETS[-1]:
        raise LlamaGraphError(f"a step has 1 to {ROW_BUCKETS[-1]} rows, not {setting.rows}")
    if (needed := setting.kv_len + steps * setting.rows) > planner.n_ctx:
        raise LlamaGraphError(f"{needed} positions do not fit the context of {planner.n_ctx}; "
                              f"take a smaller depth or fewer steps, or raise -c")


def planned(planner: Planner, setting: Setting) -> Program:
    """The setting's step."""
    return planner.plan(_key(planner, setting, setting.kv_len))


def _key(planner: Planner, setting: Setting, kv_len: int) -> StepKey:
    """The setting's step where the KV is so long, with the planner's adapters."""
    return planner.adapters.key(
        step_key(setting.rows, kv_len, "last", setting.sampler, setting.mode == "loop"))


def _node(launch: Launch, vars: Mapping[str, int], setting: Setting) -> Node:
    call = launch.resolve(vars, lambda buffer: buffer.name)
    names = [param.name for param in launch.kernel.params]
    read, written = launch.traffic(Work(setting.rows, setting.kv_len))
    return Node(
        launch.label, launch.kernel.name, launch.variant, launch.reason, call.grid, call.block,
        call.shared, dict(zip(names, call.args, strict=True)), int(read), int(written), (),
        tuple(sorted(launch.vars())), launch.stable, dict(launch.kernel.constants), launch.pdl,
        None, call.window and call.window._asdict(),
    )


def levels(before: Iterable[Sequence[int]]) -> list[int]:
    """For each node the length of the longest path that ends in it, itself counted."""
    found: list[int] = []
    for earlier in before:
        found.append(1 + max((found[j] for j in earlier), default=0))
    return found


def _totals(planner: Planner, program: Program, setting: Setting, nodes: Sequence[Node],
            bandwidth: float | None) -> dict[str, Any]:
    """Bytes in the file's types; `width` is the most nodes with equally long paths to them.

    `loop`: the node whose body the others are, and where its condition's handle lies.
    """
    level = levels(node.dependencies for node in nodes)
    read, written = (sum(n) for n in zip(*((n.bytes_read, n.bytes_written) for n in nodes),
                                         strict=True))
    floor = {"floor_ms": 1e3 * (read + written) / bandwidth} if bandwidth else {}
    loop = {"loop": {"node": "WHILE", "body": len(nodes),
                     "handle": place(planner.io["condition"])}} if program.key.repeats else {}
    return {
        "target": planner.target.name, "graph_mode": setting.mode, "rows": setting.rows,
        "depth_tokens": setting.depth, "row_bucket": program.key.rows,
        "attention": program.key.attention, "sampler": program.key.sampler,
        "adapters": list(program.key.adapters),
        "nodes": len(nodes), "kernels": dict(Counter(n.kernel for n in nodes).most_common()),
        "edges": sum(len(n.dependencies) for n in nodes),
        "depth": max(level), "width": max(Counter(level).values()),
        "graphs": len({n.part for n in nodes} - {None}),
        "bytes_read": read, "bytes_written": written,
        "bytes_per_token": (read + written) / setting.rows, **floor,
        "scratch_bytes": program.scratch_bytes, "weights_bytes": planner.weights_bytes,
        "kv_bytes": planner.kv.bytes_at(setting.kv_len), "kv_bytes_reserved": planner.kv.n_bytes,
        "io_bytes": planner.io["counters"].stop, "mapped_bytes": planner.io["candidates"].stop,
        "l2_persist_bytes": planner.target.l2_persist,
        **loop,
    }


def walk(planner: Planner, setting: Setting, steps: int) -> Updates:
    """Resolves the launches of `steps` steps after the setting's, as an executor would.

    Nothing runs. Each program keeps the calls that it had last.
    """
    known: dict[StepKey, tuple[Program, Mapping[str, int], dict[int, Call]]] = {}
    labels, at, switches, last = Counter[str](), {}, [], None
    for kv_len in range(setting.kv_len, setting.kv_len + steps * setting.rows + 1, setting.rows):
        key, vars = _key(planner, setting, kv_len), attention_vars(planner.target, kv_len)
        if last not in (None, key):
            switches.append(kv_len)
        last = key
        program, before, old = known.get(key) or (planner.plan(key), {}, {})
        if vars == before:
            continue
        new = {i: launch.resolve(vars, place) for i, launch in enumerate(program.launches)
               if launch.vars()}
        if changed := [program.launches[i].label for i in old if new[i] != old[i]]:
            labels.update(changed)
            at[kv_len] = len(changed)
        known[key] = program, vars, new
    return Updates(steps, labels.total(), tuple(labels), at, tuple(switches))


@dataclass(frozen=True)
class Group:
    """Nodes outside the layers, or those of equal layers, shown as the first of them has them."""

    layers: tuple[int, ...]
    nodes: tuple[Node, ...]


def folded(nodes: Sequence[Node]) -> list[Group]:
    """Layers that do the same are one group; where they depend on others may differ."""
    found: dict[Any, Group] = {}
    for layer, run in groupby(nodes, key=lambda node: node.layer):
        group = tuple(run)
        seen: Any = tuple((n.name, n.kernel, n.variant, n.reason, n.grid, n.block, n.shared,
                           n.bytes_read, n.bytes_written, n.updated_by, n.registers, n.priority)
                          for n in group)
        same = found.get(seen) if layer is not None else None
        layers = (*(same.layers if same else ()), *(() if layer is None else (layer,)))
        found[seen if layer is not None else len(found)] = Group(
            layers, same.nodes if same else group)
    return list(found.values())
