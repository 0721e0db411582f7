"""Reads a step's graph back from its device and holds it against the plan; runs it on.

Knows the plan and a device; no driver call is made here.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

from llamagraph.adapters import Adapters
from llamagraph.errors import LlamaGraphError
from llamagraph.gguf.reader import GGUFFile
from llamagraph.inspection import Inspection, Updates, edges, parts, priorities
from llamagraph.kernels.attention import attention_vars
from llamagraph.program.device import Device, GraphNode
from llamagraph.program.launch import Call, Launch, Program
from llamagraph.runner import Progress, Runner
from llamagraph.sampling import SamplingParams

MOST_SHOWN = 5


def verify(file: GGUFFile, device: Device, inspection: Inspection, n_ctx: int | None = None,
           progress: Progress | None = None,
           types: tuple[str | None, str | None] = (None, None),
           adapters: Adapters | None = None) -> Inspection:
    """Loads the model and holds what the device makes of it against the inspection: see `hold`."""
    warnings = list[str]()
    runner = Runner(file, device, inspection.setting.mode, n_ctx, progress, warnings.append,
                    type_k=types[0], type_v=types[1], adapters=adapters)
    try:
        return hold(runner, inspection, warnings)
    finally:
        runner.close_executors()


def hold(runner: Runner, inspection: Inspection, warnings: Sequence[str] = ()) -> Inspection:
    """The inspection with what the device says of the graphs in `totals`.

    The steps that it plans to go on by are run, and their updates counted. LlamaGraphError where
    the mode makes no graph here, and where nodes, edges, parameters or updates are not as planned.
    """
    setting, device = inspection.setting, runner.device
    runner.reset()
    runner.executors.close()  # a graph shows what it was made with
    runner.prepare([inspection.key], setting.kv_len)
    executor = runner.executors[inspection.key]
    if not executor.graphs:
        raise LlamaGraphError(warnings[0] if warnings else
                              f"--graph-mode {setting.mode} makes no graph to read back")
    vars = attention_vars(device.target, setting.kv_len)
    read = [device.graphs.read_back(graph) for graph in executor.graphs]
    _compare(executor.program, vars, device, setting.mode, read)
    facts = {"graphs": len(read), "nodes": sum(map(len, read)),
             "edges": sum(len(node.after) for nodes in read for node in nodes),
             "programmatic_edges": sum(early for nodes in read for node in nodes
                                       for _, early in node.after),
             **_made(executor)}
    if handles := list(filter(None, map(device.graphs.handle, executor.graphs))):
        facts["handles"] = handles
    updates = _run(runner, inspection) if inspection.updates.steps else inspection.updates
    memory = {**device.memory.account(), "graphs": executor.size()}
    totals = {**inspection.totals, "driver": facts, "memory_bytes": memory}
    nodes = list(inspection.nodes)
    for i, node in zip(chain(*_runs(executor.program, setting.mode)), chain(*read), strict=True):
        nodes[i] = replace(nodes[i], registers=node.registers or nodes[i].registers)
    return replace(inspection, nodes=tuple(nodes), totals=totals, updates=updates)


def _runs(program: Program, mode: str) -> list[list[int]]:
    """The launches of each graph."""
    numbers = parts(program.launches, mode)
    return [[i for i, _ in run] for number, run in groupby(enumerate(numbers), lambda x: x[1])
            if number is not None]


def _made(executor: Any) -> dict[str, Any]:
    """Bytes and milliseconds of an executor's graphs: all of it, and by what was done."""
    spent = Counter[str]()
    for graph in executor.graphs:
        spent.update(executor.device.graphs.times(graph))
    return {"graph_bytes": executor.size(), "prepare_ms": 1e3 * executor.prepare_seconds,
            **{f"{name}_ms": 1e3 * seconds for name, seconds in spent.items()}}


def _run(runner: Runner, inspection: Inspection) -> Updates:
    """Runs the setting's step and those after it; what they updated, which must be as planned."""
    setting, planned = inspection.setting, inspection.updates
    SamplingParams(temp=0, seed=0).write(runner.device.memory, runner.io)
    if setting.depth:
        runner.prefill([0] * setting.depth, setting.sampler)
    labels, at = Counter[str](), dict[int, int]()
    for _ in range(planned.steps + 1):
        runner.write_tokens([0] * setting.rows)
        runner.device.memory.write(runner.io["n_rows"], [setting.rows])
        executor = runner.step(setting.rows, "last", setting.sampler)
        if executor.changed:
            at[runner.n_past] = len(executor.changed)
            labels.update(executor.program.launches[i].label for i in executor.changed)
    runner.device.queue.wait()
    if at != (planned.at or {}) or set(labels) != set(planned.labels):
        raise LlamaGraphError(f"{planned.steps} steps updated {at} nodes by KV length, planned "
                              f"{dict(planned.at or {})}")
    return replace(planned, node_updates=labels.total(), labels=tuple(labels), at=at, ran=True)


def _compare(program: Program, vars: Mapping[str, int], device: Device, mode: str,
             read: Sequence[Sequence[GraphNode]]) -> None:
    found, launches = list[str](), program.launches
    runs, preferred = _runs(program, mode), priorities(program, mode)
    if len(runs) != len(read):
        found.append(f"{len(runs)} graphs are planned, {len(read)} were made")
    for run, nodes in zip(runs, read, strict=False):
        part = [launches[i] for i in run]
        calls = [launch.resolve(vars, device.memory.address) for launch in part]
        planned = [_planned(call, earlier, part, preferred[i], device) for i, call, earlier
                   in zip(run, calls, edges(part, mode), strict=True)]
        found += differences(part, planned, nodes)
    if found:
        more = f"; and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
        raise LlamaGraphError(
            f"the device's graph differs from the plan: {'; '.join(found[:MOST_SHOWN])}{more}"
        )


def _planned(call: Call, earlier: Sequence[int], part: Sequence[Launch], priority: int,
             device: Device) -> GraphNode:
    """What should be read back; a launch after a single other one starts early where both do."""
    early = len(earlier) == 1 and call.pdl and part[earlier[0]].pdl
    return GraphNode(call.kernel.name, call.grid, call.block, call.shared,
                     tuple(device.queue.pack(call)), tuple((j, early) for j in earlier),
                     call.window, priority)


def differences(launches: Sequence[Launch], planned: Sequence[GraphNode],
                nodes: Sequence[GraphNode]) -> list[str]:
    """What a graph's nodes, in their order, have that the plan has not: a line each."""
    found = []
    if len(nodes) != len(launches):
        found.append(f"{len(launches)} nodes are planned, {len(nodes)} are there")
    for launch, plan, node in zip(launches, planned, nodes, strict=False):
        found += [f"{launch.label}: {what} is {is_}, planned {was}"
                  for what in ("function", "grid", "block", "shared", "after", "window", "priority")
                  if (is_ := getattr(node, what)) != (was := getattr(plan, what))]
        found += _arguments(launch, plan.params, node.params)
    return found


def _arguments(launch: Launch, planned: Sequence[bytes], read: Sequence[bytes]) -> list[str]:
    """Arguments that differ; the driver gives as many bytes of each as its type has."""
    if len(planned) != len(read):
        return [f"{launch.label}: {len(read)} arguments, planned {len(planned)}"]
    return [f"{launch.label}: argument {param.name} is {is_.hex()}, planned {was.hex()}"
            for param, was, is_ in zip(launch.kernel.params, planned, read, strict=True)
            if was[: len(is_)] != is_]
