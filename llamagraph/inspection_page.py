"""Draws an inspected step: as Graphviz text, and as one HTML page that needs nothing else.

The page's own text is `page.html`; this adds the data. Knows no model.
"""

from collections.abc import Sequence
from itertools import groupby

from llamagraph.html_page import fill
from llamagraph.inspection import Inspection, Node


def page(inspection: Inspection, title: str) -> str:
    """The page: nodes and edges drawn in layers that fold, with search and facts."""
    data = inspection.as_dict() | {"title": title}
    data["updates"] |= {"at": inspection.updates.at or {},
                        "programs": inspection.updates.programs}
    return fill("page.html", title, data)


def dot(inspection: Inspection, title: str) -> str:
    """The graph in Graphviz' language, a cluster a layer, one around them all for a loop."""
    kernels = {name: i for i, name in enumerate(sorted({n.kernel for n in inspection.nodes}))}
    lines = [f"digraph {_quoted(title)} {{", '  node [shape=box style=filled fontname="sans"]']
    for layer, run in groupby(enumerate(inspection.nodes), key=lambda item: item[1].layer):
        nodes = [f"    n{i} {_attributes(node, kernels)}" for i, node in run]
        lines += nodes if layer is None else _cluster(layer, nodes)
    lines += [f"  n{j} -> n{i}" for j, i in inspection.edges]
    if loop := inspection.totals.get("loop"):
        label = _quoted(f"{loop['node']} while the condition of {loop['handle']} holds")
        lines[2:] = [f"subgraph cluster_loop {{ label={label}", *lines[2:], "}"]
    return "\n".join([*lines, "}", ""])


def _cluster(layer: int, nodes: Sequence[str]) -> list[str]:
    return [f"  subgraph cluster_{layer} {{", f'    label="blk.{layer}"', *nodes, "  }"]


def _attributes(node: Node, kernels: dict[str, int]) -> str:
    hue = kernels[node.kernel] / len(kernels)
    label = f"{node.label}\\n{node.kernel} {node.variant}".rstrip()
    return f'[label={_quoted(label)} fillcolor="{hue:.3f} 0.25 1.0" tooltip={_quoted(node.reason)}]'


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'
