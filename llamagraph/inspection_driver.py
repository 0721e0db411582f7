"""Reads a graph back from the driver and holds it against the plan.

Knows the plan and a device whose graphs can be read back; no driver call is made here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from llamagraph.errors import LlamaGraphError
from llamagraph.gguf.reader import GGUFFile
from llamagraph.inspection import Inspection, edges, parts
from llamagraph.kernels.attention import attention_vars
from llamagraph.program.launch import Call, Launch, Program
from llamagraph.runner import Progress, Runner

Pack = Callable[[Call], Sequence[bytes]]  # a call's arguments as a kernel takes them, 8 bytes each
MOST_SHOWN = 5


class Kept:
    """A device's graphs, with those that were made through it."""

    def __init__(self, graphs: Any):
        self._graphs = graphs
        self.made: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graphs, name)

    def capture(self, *args: Any) -> Any:
        return self._keep(self._graphs.capture(*args))

    def build(self, *args: Any) -> Any:
        return self._keep(self._graphs.build(*args))

    def _keep(self, made: Any) -> Any:
        self.made.append(made[0])
        return made


def packed(call: Call) -> list[bytes]:
    """As the CUDA device packs a call for the driver."""
    from llamagraph.devices.cuda.device import pack

    return [value.tobytes() for value in pack(call.kernel.params, call.args)]


def verify(file: GGUFFile, device: Any, inspection: Inspection, n_ctx: int | None = None,
           progress: Progress | None = None, pack: Pack = packed,
           types: tuple[str | None, str | None] = (None, None)) -> Inspection:
    """The inspection with what the driver says of the graphs in `totals`; the model is loaded.

    LlamaGraphError where the mode makes no graph here, and where nodes, edges or parameters differ
    from the plan.
    """
    setting, warnings = inspection.setting, list[str]()
    if not hasattr(device.graphs, "read_back"):
        raise LlamaGraphError(f"--device {device.name}: its graphs are plain lists; plan for it "
                              f"with --target {device.target.name} instead")
    device.graphs = kept = Kept(device.graphs)
    runner = Runner(file, device, setting.mode, n_ctx, progress, warnings.append,
                    type_k=types[0], type_v=types[1])
    try:
        runner.n_past = setting.kv_len - 1  # an executor is made for the step after
        runner.kv.grow(device.memory, setting.kv_len)
        executor = runner.executors[inspection.key]
        if not kept.made:
            raise LlamaGraphError(warnings[0] if warnings else
                                  f"--graph-mode {setting.mode} makes no graph to read back")
        vars = attention_vars(device.target, setting.kv_len)
        read = [kept.read_back(graph) for graph in kept.made]
        _compare(executor.program, vars, device.memory.address, setting.mode, read, pack)
        facts = {"graphs": len(read), "nodes": sum(map(len, read)),
                 "edges": sum(len(node.after) for nodes in read for node in nodes),
                 "graph_bytes": executor.size(), "prepare_ms": 1e3 * executor.prepare_seconds}
        return replace(inspection, totals={**inspection.totals, "driver": facts})
    finally:
        runner.executors.close()


def _compare(program: Program, vars: Mapping[str, int], address: Callable[[Any], Any], mode: str,
             read: Sequence[Sequence[Any]], pack: Pack) -> None:
    found, launches = list[str](), program.launches
    numbers = parts(launches, mode)
    runs = [[i for i, _ in run] for number, run in groupby(enumerate(numbers), lambda x: x[1])
            if number is not None]
    if len(runs) != len(read):
        found.append(f"{len(runs)} graphs are planned, {len(read)} were made")
    for run, nodes in zip(runs, read, strict=False):
        calls = [launches[i].resolve(vars, address) for i in run]
        part = [launches[i] for i in run]
        found += differences(part, calls, edges(part, mode), nodes, pack)
    if found:
        more = f"; and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
        raise LlamaGraphError(
            f"the driver's graph differs from the plan: {'; '.join(found[:MOST_SHOWN])}{more}"
        )


def differences(launches: Sequence[Launch], calls: Sequence[Call],
                before: Sequence[Sequence[int]], nodes: Sequence[Any], pack: Pack) -> list[str]:
    """What a graph's nodes, in their order, have that the plan has not: a line each."""
    found = []
    if len(nodes) != len(launches):
        found.append(f"{len(launches)} nodes are planned, {len(nodes)} are there")
    for launch, call, earlier, node in zip(launches, calls, before, nodes, strict=False):
        early = len(earlier) == 1 and launch.pdl and launches[earlier[0]].pdl
        planned = {
            "function": call.kernel.name, "grid": call.grid, "block": call.block,
            "shared": call.shared, "after": tuple((j, early) for j in earlier),
        }
        found += [f"{launch.label}: {what} is {is_}, planned {was}"
                  for what, was in planned.items() if (is_ := getattr(node, what)) != was]
        found += _arguments(launch, pack(call), node.params)
    return found


def _arguments(launch: Launch, planned: Sequence[bytes], read: Sequence[bytes]) -> list[str]:
    """Arguments that differ; the driver gives as many bytes of each as its type has."""
    if len(planned) != len(read):
        return [f"{launch.label}: {len(read)} arguments, planned {len(planned)}"]
    return [f"{launch.label}: argument {param.name} is {is_.hex()}, planned {was.hex()}"
            for param, was, is_ in zip(launch.kernel.params, planned, read, strict=True)
            if was[: len(is_)] != is_]
