"""What is asked for beside the order: which launches go first, and what L2 should keep."""

import itertools
import random

import pytest
from click.testing import CliRunner
from test_program import KERNEL, launch_of

from llamagraph.cli import cli
from llamagraph.gguf.synthetic import SyntheticFile
from llamagraph.inspection import Setting, inspect
from llamagraph.planner import Planner
from llamagraph.program.deps import dependencies, priorities
from llamagraph.program.launch import StepKey, Work, dense
from llamagraph.program.persist import PARTS, weights
from llamagraph.program.target import L2_PERSIST, L2_WINDOW, target_named


def buffer(at, size=1):
    return dense(f"b{at}", "scratch", 4 * at, (size,))


def launch(reads, writes, also, size=1):
    return launch_of([buffer(reads), buffer(writes, size), buffer(also)])


def test_of_two_branches_the_one_with_more_bytes_goes_first():
    start = launch(90, 0, 91)
    short, long = launch(0, 10, 92), launch(0, 20, 93, size=50)
    end = launch_of([buffer(10), buffer(80), buffer(20)])
    for branches, expected in (((short, long), [0, 0, 1, 0]), ((long, short), [0, 1, 0, 0])):
        launches = [start, *branches, end]
        assert priorities(launches, dependencies(launches), 1) == expected


def test_a_chain_prefers_nothing():
    launches = [launch(i, i + 1, 50) for i in range(6)]
    assert priorities(launches, dependencies(launches), 1) == [0] * 6
    assert priorities([], [], 1) == []


def paths(before, i):
    """Every path from a first launch to i."""
    return [[*path, i] for j in before[i] for path in paths(before, j)] or [[i]]


def test_what_is_preferred_is_on_the_longest_path_and_has_a_rival():
    rng = random.Random(3)
    for _ in range(60):
        launches = [launch_of([buffer(rng.randrange(12)), buffer(rng.randrange(12, 30), 3),
                               buffer(rng.randrange(30, 34))]) for _ in range(7)]
        launches += [launch_of([buffer(rng.randrange(12, 30)), buffer(rng.randrange(30, 40)),
                                buffer(rng.randrange(12, 40))]) for _ in range(4)]
        before = dependencies(launches)
        found = priorities(launches, before, 1)
        size = [sum(KERNEL.traffic(Work(), x.args)) for x in launches]
        longest = max(sum(size[i] for i in p) for k in range(len(launches))
                      for p in paths(before, k))
        reach = [set(itertools.chain.from_iterable(paths(before, i))) for i in range(len(launches))]
        rivals = [any(i not in reach[j] and j not in reach[i] for j in range(len(launches)))
                  for i in range(len(launches))]
        preferred = [i for i, p in enumerate(found) if p]
        assert all(rivals[i] for i in preferred)
        whole = [p for k in range(len(launches)) for p in paths(before, k)
                 if sum(size[i] for i in p) == longest]
        assert any([i for i in p if rivals[i]] == preferred for p in whole)


def planner(spec="135m:q8_0", persist=True, target="sm_90a"):
    return Planner(SyntheticFile(spec), target_named(target, persist))


def test_a_prompts_products_have_a_preferred_one_and_a_decode_chain_has_none():
    split = planner(persist=False, target="sm_80")  # q, k and v are launches of their own there
    found = inspect(split, Setting(rows=64, depth=5)).nodes
    layer = {n.name: n.priority for n in found if n.layer == 1}
    assert layer["attn_q"] == 1 and layer["attn_k"] == layer["attn_v"] == 0
    assert not any(n.priority for n in inspect(planner(persist=False), Setting()).nodes)
    captured = inspect(split, Setting(rows=64, mode="capture")).nodes
    assert not any(n.priority for n in captured)


def test_every_weight_of_a_decode_step_asks_for_the_same_share():
    p = planner()
    launches = p.plan(StepKey()).launches
    asking = [x for x in launches if x.window]
    assert len(asking) == len([w for w in weights(launches) if w])
    assert {x.window.hit_ratio for x in asking} == {asking[0].window.hit_ratio}
    kept = sum(x.window.n_bytes * x.window.hit_ratio for x in asking)
    assert 0.9 * p.target.l2_persist < kept <= p.target.l2_persist
    for x in asking:
        assert x.window.where.arena == "weights"
        assert x.window.n_bytes == min(x.window.where.n_bytes, L2_WINDOW)
        assert x.reason.endswith("stay in L2") and x.window.where.name in x.reason
        call = x.resolve({"n_attn_blocks": 1}, lambda b: b.start)
        assert call.window == (x.window.where.start, *x.window[1:])
        assert call.window.hit_ratio * PARTS == int(call.window.hit_ratio * PARTS)


@pytest.mark.parametrize("spec, key, persist", [
    ("135m:q8_0", StepKey(), False),  # nobody asked
    ("135m:q8_0", StepKey(8), True),  # rows share the weights within the step
    ("1b:q4_k_m", StepKey(), True),  # a twentieth of the bytes
])
def test_where_nothing_is_gained_nothing_is_asked(spec, key, persist):
    launches = planner(spec, persist).plan(key).launches
    assert not any(x.window for x in launches)
    plain = planner(spec, False).plan(key).launches
    assert [x.reason for x in launches] == [x.reason for x in plain]


def test_a_target_without_set_aside_cache_asks_nothing():
    assert target_named("sm_75", persist=True).l2_persist == 0
    assert target_named("sm_90a").l2_persist == 0 < L2_PERSIST["sm_90a"]
    assert not any(x.window for x in planner(target="sm_75").plan(StepKey()).launches)


def test_inspecting_shows_the_share():
    arguments = ["inspect-graph", "--synthetic", "135m:q8_0", "--l2-persist", "auto"]
    done = CliRunner().invoke(cli, arguments)
    assert "stay in L2" in done.stdout and done.exit_code == 0
    assert "stay in L2" not in CliRunner().invoke(cli, arguments[:3]).stdout
