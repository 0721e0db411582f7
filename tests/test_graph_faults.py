"""Faults that graphs have had elsewhere: that none is here, and that tests/graph-faults.md is true.

A row of its table names the tests that cover an entry; entries that no other test covers are here.
"""

import re

import numpy as np
import pytest
from conftest import REPOSITORY
from tiny import tiny_model

from llamagraph.bench import bench
from llamagraph.bench_result import Case
from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import MemoryLimitError
from llamagraph.execute import EXECUTORS
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.attention import LONG_KV
from llamagraph.model import Model
from llamagraph.planner import Planner, usual_keys
from llamagraph.program.launch import Launch, StepKey
from llamagraph.program.target import target_named
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams

GREEDY = SamplingParams(temp=0, seed=0)
TABLE = REPOSITORY / "tests" / "graph-faults.md"
N_ENTRIES = 47


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", n_ctx=LONG_KV + 64)


# --- the table ---------------------------------------------------------------------------------


def rows():
    """Number, what happened elsewhere, why not here: the table's rows."""
    found = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", TABLE.read_text(), re.MULTILINE)
    return [(int(number), fault, answer) for number, fault, answer in found]


def named(answer):
    """The tests that an answer names, as file and function."""
    return re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", answer)


def test_every_entry_is_answered():
    assert [number for number, _, _ in rows()] == list(range(1, N_ENTRIES + 1))
    for number, fault, answer in rows():
        assert re.search(r"#\d+|\[\d+\]", fault), f"{number} cites nothing"
        assert named(answer) or answer.startswith("Cannot happen"), f"{number} has no answer"


def test_every_test_that_is_named_exists():
    for number, _, answer in rows():
        for file, name in named(answer):
            text = (REPOSITORY / file).read_text()
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{number}: {file}::{name}"
        assert len(named(answer)) == answer.count("::"), f"{number}: a name is cut short"


# --- the host's part ---------------------------------------------------------------------------


def test_graphs_are_the_default_on_a_gpu_alone(path):
    for target, mode in (("numpy", "stream"), ("sm_80", "capture"), ("sm_90a", "capture")):
        with Model(GGUFFile(path), CpuDevice(target_named(target))) as model:
            assert model.runner.mode == mode


@pytest.mark.parametrize("mode", ["capture", "build", "partial"])
def test_a_step_resolves_nothing_until_a_variable_changes(path, mode, monkeypatch):
    """What Python does for a token does not grow with the graph."""
    runner, resolved = Runner(GGUFFile(path), CpuDevice(), mode, 512), []
    runner.prefill([1] * 250)
    runner.step(1, "last", "greedy")
    resolve = Launch.resolve
    monkeypatch.setattr(Launch, "resolve", lambda self, *a: (resolved.append(self.label),
                                                            resolve(self, *a))[1])
    for _ in range(5):
        runner.step(1, "last", "greedy")
    assert resolved == []
    runner.step(1, "last", "greedy")  # the 257th position: a second chunk
    assert resolved == ["blk.0.attn", "blk.1.attn"]


def test_the_next_step_is_queued_before_a_token_is_handed_out(path):
    device = CpuDevice()
    device.queue.ahead = True
    runner, waiting = Runner(GGUFFile(path), device, "capture", 512), []
    expected = list(Runner(GGUFFile(path), CpuDevice(), "stream", 512).generate([1, 2], GREEDY, 6))
    tokens = []
    for token in runner.generate([1, 2], GREEDY, 6):
        waiting.append(runner.n_past - len(runner.sequence) + 1)
        tokens.append(token)
    assert tokens == expected and waiting == [1] * 5 + [0]
    assert runner.n_past == 2 + 5, "what ran too far is taken back"


@pytest.mark.parametrize("mode", ["capture", "build", "partial", "loop"])
def test_making_graphs_changes_nothing_on_the_device(path, mode):
    runner = Runner(GGUFFile(path), CpuDevice(), mode, 512)
    runner.prefill([1, 2, 3, 4])
    arenas = [a for name, a in runner.device.memory._arenas.items() if name != "scratch"]
    before = [arena.tobytes() for arena in arenas]
    loop = {"loop_to": 40} if mode == "loop" else {}
    runner.prepare([*usual_keys(20, "chain", **loop), StepKey(1, "last", "long"), StepKey(1)])
    assert len(runner.executors) > 3 and [arena.tobytes() for arena in arenas] == before


# --- many steps, many shapes -------------------------------------------------------------------


class Counting(CpuDevice):
    """Counts the graphs that are made and closed, and notes closings without a wait."""

    def __init__(self):
        super().__init__()
        self.made = self.in_flight = 0
        self.closed, self.early = [], 0
        graphs, queue = self.graphs, self.queue
        capture, close, replay, wait = graphs.capture, graphs.close, graphs.replay, queue.wait

        def captured(*arguments):
            self.made += 1
            return capture(*arguments)

        def replayed(graph):
            self.in_flight += 1
            replay(graph)

        def waited():
            self.in_flight = 0
            wait()

        def closing(graph):
            self.early += self.in_flight
            self.closed.append(graph)
            close(graph)

        graphs.capture, graphs.replay, graphs.close = captured, replayed, closing
        queue.wait = waited


def test_many_prompts_make_no_more_graphs_than_programs(path):
    """Lengths alternate, answers too: every program is captured once, ever."""
    device = Counting()
    runner, keys = Runner(GGUFFile(path), device, "capture", 512), set()
    for i in range(60):
        runner.reset()
        n = (3, 30, 9, 100, 1)[i % 5]
        keys |= set(usual_keys(n, "greedy"))
        list(runner.generate([1] * n, GREEDY, 1 + i % 3))
    assert device.made == runner.executors.made == len(runner.executors) == len(keys) == 5
    assert not device.closed and runner.mode == "capture"


def test_a_graph_is_closed_only_when_nothing_is_in_flight(path):
    device = Counting()
    runner = Runner(GGUFFile(path), device, "capture", 512)
    runner.executors.limit = 2
    for logits in ("last", "none", "all", "last"):
        for n in (2, 20, 40):
            runner.reset()
            runner.write_tokens([1] * n)
            device.memory.write(runner.io["n_rows"], [n])
            runner.step(n, logits, "greedy")
    runner.executors.close()
    assert len(device.closed) >= 8 and device.early == 0


def test_a_long_prompt_leaves_graphs_on(path):
    device = Counting()
    runner = Runner(GGUFFile(path), device, "capture", 1300, n_ubatch=512)
    list(runner.generate([1] * 1100, GREEDY, 4))
    made = device.made
    list(runner.generate([1] * 70, GREEDY, 30))
    assert runner.mode == "capture" and device.made == made


def test_what_is_measured_makes_no_graph(path):
    device, cases = Counting(), [Case(20, 5)]
    results = list(bench(GGUFFile(path), device, cases, ["capture"], 4, n_ctx=512,
                         probe_bytes=1 << 20))
    assert device.made == 2 and len(results[0].samples_ns) == 4


@pytest.mark.parametrize("mode", EXECUTORS)
def test_a_sequence_that_is_taken_back_goes_on_as_if_it_had_not_been_left(path, mode):
    runner = Runner(GGUFFile(path), CpuDevice(), mode, 512)
    tokens = np.random.default_rng(1).integers(0, 200, 290).tolist()
    runner.prefill(tokens)
    expected = runner.logits([5, 6, 7])
    for back in (256, 250, 3):
        runner.reset(back)
        runner.prefill([9] * 11)  # a guess that was wrong
        runner.reset(back)
        runner.prefill(tokens[back:])
        assert np.abs(runner.logits([5, 6, 7]) - expected).max() < 1e-4
    runner.reset(290)
    first = runner.logits([5, 6, 7])
    runner.reset(290)
    assert np.array_equal(runner.logits([5, 6, 7]), first)


def test_another_attention_at_depth_gives_the_same_bits_in_every_mode(path):
    """Over the depth at which another program takes over, and back: none is frozen in."""
    runner = Runner(GGUFFile(path), CpuDevice(target_named("sm_90a")), "stream")
    runner.prefill([i % 200 for i in range(LONG_KV - 3)])
    found = []
    for mode in EXECUTORS:
        runner.executors.close()
        runner.mode = mode
        runner.reset(LONG_KV - 3)
        steps = [runner.step(1, "last", "greedy") for _ in range(5)]
        assert [e.program.key.attention for e in steps] == ["short"] * 2 + ["long"] * 3
        found.append(runner.read_logits(steps[-1]))
        runner.reset(LONG_KV - 3)
        found.append(runner.read_logits(runner.step(1, "last", "greedy")))
    assert all(np.array_equal(a, b) for a, b in zip(found, found[2:], strict=False))


def test_graphs_that_do_not_fit_give_way_to_launches(path):
    device, said = CpuDevice(), []

    def full(*_):
        raise MemoryLimitError("instantiating a graph: out of memory")

    device.graphs.capture = full
    runner = Runner(GGUFFile(path), device, "capture", 512, warn=said.append)
    tokens = list(runner.generate([1, 2, 3], GREEDY, 5))
    assert len(tokens) == 5 and len(said) == 1 and "out of memory" in said[0]


# --- kernels -----------------------------------------------------------------------------------


def functions():
    """Name and body of each function of csrc, and whether it is an entry point."""
    found = {}
    for path in (REPOSITORY / "csrc").iterdir():
        text = path.read_text()
        for match in re.finditer(r"(__global__|__device__)[^;{}()]*?(?:__launch_bounds__\([^)]*\)"
                                 r"[^;{}()]*?)?(\w+)\([^{};]*\)\s*\{", text):
            depth, end = 1, match.end()
            while depth:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
            entry = match[1] == "__global__"
            found.setdefault(match[2], []).append((entry, text[match.end() : end]))
    return found


def test_every_kernel_waits_for_what_was_launched_before():
    known = functions()

    def waits(body, seen=()):
        calls = set(re.findall(r"\b(\w+)(?:<[^;(){}]*>)?\(", body)) - set(seen)
        return "pdl_wait()" in body or any(
            waits(other, (*seen, name)) for name in calls for _, other in known.get(name, ()))

    entries = {name: body for name, all_ in known.items() for entry, body in all_ if entry}
    assert len(entries) > 20
    assert [name for name, body in entries.items() if not waits(body)] == []


def test_nothing_of_a_step_starts_before_the_last_one_has_ended(path):
    """So that kernels may read the position and the KV cache before they wait."""
    ((_, first),) = functions()["embed_rows"]
    assert first.index("pdl_wait()") < first.index("pdl_launch_dependents()")
    with GGUFFile(path) as file:
        planner = Planner(file, target_named("sm_90a"), 64)
        for key in (StepKey(), StepKey(attention="long"), StepKey(rows=4)):
            assert planner.plan(key).launches[0].kernel.name == "embed_rows"


def test_kernels_use_no_library():
    for path in (REPOSITORY / "csrc").iterdir():
        headers = set(re.findall(r"#include <(.+)>", path.read_text()))
        assert headers <= {"cuda_fp16.h", "cuda_bf16.h"}, path.name
