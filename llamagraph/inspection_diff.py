"""What differs between two inspected steps, and what an update from one to the other would send.

Plain data from plain data; knows neither a model nor a device.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llamagraph.inspection import Inspection, Node, Setting
from llamagraph.program.launch import Call


@dataclass(frozen=True)
class Difference:
    """Two settings of a model. `changed`: label, field or argument, and what a and b have there.

    `update` says how a graph of a becomes one of b, and `sent` which nodes that sends; launches
    outside of graphs are none.
    """

    a: Setting
    b: Setting
    same_program: bool
    topology_equal: bool
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: Mapping[str, Mapping[str, tuple[Any, Any]]]
    update: str
    sent: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _named(inspection: Inspection) -> dict[str, tuple[Node, Call]]:
    """Nodes by label; a label's second node has its number behind it."""
    seen, found = Counter[str](), {}
    for node, call in zip(inspection.nodes, inspection.calls, strict=True):
        seen[node.label] += 1
        number = f"#{seen[node.label]}" if seen[node.label] > 1 else ""
        found[node.label + number] = (node, call)
    return found


def _changes(a: tuple[Node, Call], b: tuple[Node, Call]) -> dict[str, tuple[Any, Any]]:
    """Fields and arguments that differ; of a buffer, the address counts and the name is shown."""
    (left, call), (right, other) = a, b
    fields = {f: (x, y) for f in ("kernel", "variant", "grid", "block", "shared")
              if (x := getattr(left, f)) != (y := getattr(right, f))}
    if left.kernel != right.kernel:  # whose arguments are others
        return fields
    fields |= {name: (x, y) for name, x in left.constants.items()
               if x != (y := right.constants.get(name))}
    for name, x, y in zip(left.args, call.args, other.args, strict=True):
        if x != y:
            fields[name] = (_shown(left, name, x), _shown(right, name, y))
    return fields


def _shown(node: Node, name: str, value: Any) -> Any:
    return f"{node.args[name]} at {value}" if isinstance(value, str) else value


def _resent(nodes: int, launches: int) -> str:
    """What another step of the same program sends, in words."""
    said = ((nodes, "nodes of the same graph get new parameters"),
            (launches, "launches get new arguments"))
    return "; ".join(f"{n} {what}" for n, what in said if n) or "nothing"


def compare(a: Inspection, b: Inspection) -> Difference:
    """What differs between two settings, and what it takes to go from one to the other."""
    left, right = _named(a), _named(b)
    common = [label for label in left if label in right]
    changed = {label: c for label in common if (c := _changes(left[label], right[label]))}
    same_program = a.key == b.key and a.setting.mode == b.setting.mode
    equal = len(left) == len(right) and a.edges == b.edges and (
        [n.part for n in a.nodes] == [n.part for n in b.nodes])
    other = [label for label in common if left[label][1] != right[label][1]]
    sent = tuple(label for label in other if right[label][0].part is not None)
    if same_program:
        update = _resent(len(sent), len(other) - len(sent))
    elif a.setting.mode == b.setting.mode == "stream":
        update = "other launches; there is no graph"
    elif equal and not (a.key.repeats or b.key.repeats):
        update = f"another program of equal topology: a whole update sets {len(sent)} nodes"
    else:
        why = "the topology differs" if not equal else "a loop is made anew"
        update, sent = f"another executable: {why}", ()
    return Difference(
        a.setting, b.setting, same_program, equal, tuple(x for x in left if x not in right),
        tuple(x for x in right if x not in left), changed, update, sent,
    )
