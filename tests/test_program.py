"""Hazards and the scratch planner, on random launch lists."""

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from llamagraph.program.deps import dependencies, hazards
from llamagraph.program.launch import (
    Geometry,
    In,
    InOut,
    Kernel,
    Launch,
    Out,
    Var,
    dense,
    parameters,
)
from llamagraph.program.plan import place


def _reference(a: In, b: Out, c: InOut, n: int) -> None: ...


KERNEL = Kernel("k", "k.cu", reference=_reference, geometry=lambda *_: Geometry((1, 1, 1), 1),
                cost=None, example=None, params=parameters(_reference))


def launch_of(buffers, n=0) -> Launch:
    return Launch(KERNEL, Geometry((1, 1, 1), 32), (*buffers, n), "label")


ranges = st.tuples(st.integers(0, 40), st.integers(1, 12)).map(
    lambda r: dense("b", "scratch", 4 * r[0], (r[1],))
)
lists = st.lists(st.tuples(ranges, ranges, ranges).map(launch_of), max_size=12)


def must_follow(later: Launch, earlier: Launch) -> bool:
    return any(
        a.overlaps(b) and (r.writes or s.writes)
        for a, r in later.touches() for b, s in earlier.touches()
    )


def closure(before) -> list[set[int]]:
    reach: list[set[int]] = []
    for earlier in before:
        reach.append(set(earlier).union(*(reach[j] for j in earlier)))
    return reach


@given(lists)
def test_dependencies_order_exactly_what_conflicts(launches):
    reach = closure(dependencies(launches))
    conflicts = closure([
        {j for j in range(i) if must_follow(launches[i], launches[j])} for i in range(len(launches))
    ])
    assert reach == conflicts == closure(hazards(launches))


@given(lists)
def test_no_dependency_is_implied_by_others(launches):
    before = dependencies(launches)
    for i, earlier in enumerate(before):
        for j in earlier:
            rest = [b if k != i else [e for e in b if e != j] for k, b in enumerate(before)]
            assert j not in closure(rest)[i]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1,
                max_size=25), st.lists(st.integers(1, 500), min_size=10, max_size=10))
def test_scratch_that_lives_at_the_same_time_never_overlaps(uses, sizes):
    starts = [4096 * i for i in range(10)]
    buffers = [dense(f"b{i}", "scratch", starts[i], (sizes[i],)) for i in range(10)]
    launches = [launch_of([buffers[i] for i in use]) for use in uses]
    kept = buffers[uses[0][1]]
    placed, outputs, n_bytes = place(launches, {"kept": kept})
    spans = {}
    for i, launch in enumerate(placed):
        for old, new in zip(launches[i].args[:3], launch.args[:3], strict=True):
            first = spans.get(old.start, (new, i, i))[1]
            spans[old.start] = (new, first, i)
    spans[kept.start] = (outputs["kept"], spans[kept.start][1], len(launches))
    for start, (a, first, last) in spans.items():
        assert a.stop <= n_bytes
        for other, (b, first_b, last_b) in spans.items():
            if start != other and first <= last_b and first_b <= last:
                assert not a.overlaps(b)


def test_a_call_has_its_vars_filled_in_and_compares_by_value():
    a, b, c = (dense(n, "io", i * 256, (4,)) for i, n in enumerate("abc"))
    launch = Launch(KERNEL, Geometry((Var("n"), 1, 1), 32), (a, b, c, Var("n")), "label")
    named = launch.resolve({"n": 3}, lambda buffer: buffer.name)
    assert named.args == ("a", "b", "c", 3) and named.grid == (3, 1, 1)
    assert named == launch.resolve({"n": 3}, lambda buffer: buffer.name)
    assert named != launch.resolve({"n": 4}, lambda buffer: buffer.name)
    assert launch.vars() == {"n"}


def test_traffic_counts_what_roles_read_and_write():
    a, b, c = (dense(n, "io", i * 256, (4,)) for i, n in enumerate("abc"))
    assert launch_of((a, b, c)).traffic(SimpleNamespace()) == (32, 32)
