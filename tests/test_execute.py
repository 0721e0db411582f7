"""The executors: same tokens and bits in every mode, exact updates, edges that are all needed."""

import random

import numpy as np
import pytest
from third_device import ListDevice
from tiny import tiny_model

from llamagraph.devices.cpu import CpuDevice, CpuGraph, random_order
from llamagraph.errors import DeviceError
from llamagraph.execute import EXECUTORS, ExecutorCache
from llamagraph.execute.graph import Built
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.attention import attention_vars
from llamagraph.program.deps import dependencies
from llamagraph.program.launch import StepKey
from llamagraph.program.target import target_named
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams

GREEDY = SamplingParams(temp=0, seed=0)
DRAWN = SamplingParams(seed=7)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", "gemma3", n_ctx=400, n_layer=6)


class HostChoice(SamplingParams):
    """A chain that is always the host's."""

    def sampler(self, target, n_vocab):
        return "host"


def run(path, mode, device=None, params=GREEDY, n=300):
    """Tokens, the logits of every step, and which launches each step updated."""
    runner = Runner(GGUFFile(path), device or CpuDevice(), mode)
    logits, updates = [], []

    def seen(executor):
        logits.append(runner.read_logits(executor))
        updates.append(executor.updates)

    tokens = list(runner.generate([1, 2, 3], params, n, seen))
    return tokens, np.concatenate(logits), updates


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_modes_agree_over_a_var_that_changes(path, params):
    tokens, logits, _ = run(path, "stream", params=params)
    for mode in ("capture", "build", "partial"):
        other_tokens, other_logits, _ = run(path, mode, params=params)
        assert other_tokens == tokens
        assert np.array_equal(other_logits, logits)


def on_host(**params):
    return HostChoice(**{"top_k": 0, "temp": 1.5, **params})


@pytest.mark.parametrize("seed", range(5))
def test_the_host_chooses_the_same_in_every_mode(path, seed):
    """From the copy that ends the step; all logits and tokens agree over a `Var` that changes."""
    params = on_host(seed=seed, repeat_penalty=1.1)
    tokens, logits, _ = run(path, "stream", params=params, n=270 if seed == 0 else 12)
    for mode in ("capture", "build", "partial"):
        other_tokens, other_logits, _ = run(path, mode, params=params, n=len(tokens))
        assert other_tokens == tokens and np.array_equal(other_logits, logits)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_host_step_ends_with_a_copy_of_its_logits(path, rows):
    runner = Runner(GGUFFile(path), CpuDevice(), "build")
    runner.write_tokens([1, 2, 3])
    runner.device.memory.write(runner.io["n_rows"], [min(rows, 3)])
    executor = runner.step(min(rows, 3), "last", "host")
    last = executor.program.launches[-1]
    assert (last.kernel.name, last.label, last.pdl) == ("copy", "candidates", False)
    copied = runner.device.memory.host_view(runner.io["candidates"])
    assert np.array_equal(copied, runner.read_logits(executor)[0])
    for sampler in ("greedy", "chain"):
        other = runner.plan(StepKey(rows, sampler=sampler))
        assert not [x for x in other.launches if x.kernel.name == "copy"]


def test_a_choice_on_the_host_is_the_devices(path):
    """A GPU ranks at most 128 candidates: with all of them the host chooses, by the same chain."""
    params = SamplingParams(top_k=0, temp=1.5, repeat_penalty=1.2, logit_bias={7: 2.0}, seed=5)
    gpu, cpu = target_named("sm_90a"), target_named("numpy")
    assert params.sampler(gpu, 269) == "host" and params.sampler(cpu, 269) == "chain"
    expected = run(path, "stream", params=params, n=60)[0]
    hosts = HostChoice(**vars(params))
    assert all(run(path, mode, params=hosts, n=60)[0] == expected for mode in EXECUTORS)


@pytest.mark.parametrize("mode", EXECUTORS)
def test_only_the_changed_launches_are_updated(path, mode):
    runner = Runner(GGUFFile(path), CpuDevice(), mode)
    executor = runner.executors[StepKey()]
    holders = [i for i, launch in enumerate(executor.program.launches) if launch.vars()]
    assert [executor.program.launches[i].label for i in holders] == [
        f"blk.{i}.attn" for i in range(6)
    ]
    runner.write_tokens([i % 200 for i in range(300)])
    runner.kv.grow(runner.device.memory, 300)
    runner.device.memory.write(runner.io["n_rows"], [1])
    changes = {}
    for kv_len in range(1, 301):
        if changed := executor.run(attention_vars(runner.device.target, kv_len)):
            changes[kv_len] = changed
    assert changes == {257: holders}


def test_steady_decode_updates_nothing(path):
    _, _, updates = run(path, "capture", n=200)
    assert set(updates[1:]) == {0}


class OrderedDevice(CpuDevice):
    """Replays built graphs in the order given, over poisoned scratch."""

    def __init__(self):
        super().__init__()
        self.order = None
        self.graphs.replay = self._replay

    def _replay(self, graph: CpuGraph) -> None:
        self.memory.poison("scratch")
        for i in self.order:
            graph.bound[i]()


def decode_state(path):
    """A runner in the middle of a sequence, its decode program, and its state to go back to."""
    device = OrderedDevice()
    runner = Runner(GGUFFile(path), device, "build", n_ctx=64)
    device.order = range(10**6)
    runner.mode = "stream"
    runner.prefill([7, 8, 9])
    runner.mode = "build"
    executor = runner.executors[StepKey()]
    assert isinstance(executor, Built)
    vars = attention_vars(device.target, 4)
    start = {a: device.memory._arenas[a].copy() for a in ("kv", "io")}

    def replay(order):
        for arena, content in start.items():
            device.memory._arenas[arena][:] = content
        device.order = order
        with np.errstate(all="ignore"):
            executor.run(vars)
        state = [device.memory._arenas[a].tobytes() for a in ("kv", "io")]
        return [runner.read_logits(executor).tobytes(), *state]

    return executor.program.launches, replay


def test_a_built_graph_gives_the_same_bits_in_any_order(path):
    launches, replay = decode_state(path)
    before, rng = dependencies(launches), random.Random(0)
    expected = replay(range(len(launches)))
    assert all(replay(random_order(before, rng)) == expected for _ in range(50))


def early(before, first, later):
    """An order that respects `before` and puts `first` ahead of `later`."""
    ahead, todo = set(), [first]
    while todo:
        i = todo.pop()
        if i not in ahead:
            ahead.add(i)
            todo += before[i]
    assert later not in ahead, "the edge is implied by others"
    return sorted(ahead) + [i for i in range(len(before)) if i not in ahead]


def test_every_edge_of_a_layer_is_needed(path):
    launches, replay = decode_state(path)
    before = dependencies(launches)
    expected = replay(range(len(launches)))
    layer = [i for i, launch in enumerate(launches) if launch.label.startswith("blk.1.")]
    edges = [(j, i) for i in layer for j in before[i]]
    assert len(edges) >= len(layer)
    for j, i in edges:
        without = [[e for e in b if (e, k) != (j, i)] for k, b in enumerate(before)]
        assert replay(early(without, i, j)) != expected, (launches[j].label, launches[i].label)


@pytest.mark.parametrize("mode", ["stream", "capture"])
def test_a_third_device_runs_unchanged(path, mode):
    assert run(path, mode, ListDevice(), n=20)[0] == run(path, "stream", n=20)[0]


class Closing:
    def __init__(self, key, closed, old=None):
        self.key, self.closed, self.old = key, closed, old

    def close(self):
        self.closed.append(self.key.rows)


def test_the_cache_is_bounded_and_closes_the_least_recently_used():
    closed = []
    cache = ExecutorCache(lambda key, old: Closing(key, closed, old), limit=2)
    for rows in (1, 2, 1, 3, 1):
        cache[StepKey(rows=rows)]
    assert closed == [2] and len(cache) == 2 and cache.made == 3
    assert cache[StepKey(rows=3)].old.key.rows == 2, "it is offered to the new one first"
    cache.limit = 1
    assert cache[StepKey(rows=4)].old.key.rows == 3 and closed == [2, 1, 3]
    cache.close()
    assert closed == [2, 1, 3, 4]


def alternating(path, mode, limit):
    """Prompts of 20 and of 6 tokens (two row buckets, one topology) by turns, and what was used."""
    device = CpuDevice()
    runner = Runner(GGUFFile(path), device, mode)
    runner.executors.limit = limit
    logits, graphs = [], []
    for n in (20, 6, 20, 6):
        runner.reset()
        executor = runner.prefill(range(1, n + 1))
        logits.append(runner.read_logits(executor))
        graphs.append(list(executor.graphs))
    return np.concatenate(logits), graphs, runner


@pytest.mark.parametrize("mode", ["capture", "build", "partial"])
def test_one_executable_serves_two_row_buckets_of_equal_topology(path, mode):
    expected = alternating(path, "stream", 16)[0]
    logits, graphs, runner = alternating(path, mode, 1)
    assert np.array_equal(logits, expected)
    assert graphs[1] == graphs[0] == graphs[2], "updated whole, never made anew"
    assert runner.executors.made == 4 and len(runner.executors) == 1
    both = alternating(path, mode, 2)[1]
    assert both[0] != both[1] and both[2:] == both[:2]


@pytest.mark.parametrize("mode", ["capture", "build", "partial"])
def test_a_refused_update_ends_in_one_new_executable(path, mode):
    device, asked, closed = CpuDevice(), [], []
    become, close = device.graphs._become, device.graphs.close
    runner = Runner(GGUFFile(path), device, mode)
    device.graphs._become = lambda old, new: (asked.append(old), become(old, new))[1]
    device.graphs.close = lambda graph: (closed.append(graph), close(graph))[1]
    runner.executors.limit = 1
    before = list(runner.executors[StepKey(8)].graphs)
    asked.clear()
    after = runner.executors[StepKey(8, "none")].graphs  # without the head
    assert len(asked) == len(after) and asked[-1] is before[-1] is closed[-1]
    assert before[-1] not in after and after[:-1] == before[:-1], "parts that are equal go on"
    assert set(closed) == {before[-1]}


def test_a_graph_that_cannot_be_made_leaves_nothing_open(path):
    device, closed = CpuDevice(), []
    close = device.graphs.close
    device.graphs.close = lambda graph: (closed.append(graph), close(graph))[1]
    runner = Runner(GGUFFile(path), device, "partial")
    runner.executors.limit = 1
    before = list(runner.executors[StepKey(8)].graphs)
    device.graphs.capture = refuse
    assert runner.executors[StepKey()].graphs == [] and runner.mode == "stream"
    assert set(before) <= set(closed)


def refuse(*_):
    raise DeviceError("capturing: not permitted")


def test_a_refused_capture_falls_back_to_the_stream_and_says_so_once(path):
    device, said = CpuDevice(), []
    device.graphs.capture = refuse
    runner = Runner(GGUFFile(path), device, "capture", warn=said.append)
    tokens = list(runner.generate([1, 2, 3], GREEDY, 20))
    assert tokens == run(path, "stream", n=20)[0]
    assert said == ["no graphs: capturing: not permitted; launching one by one"]
    assert runner.mode == "stream"


@pytest.mark.parametrize("mode", EXECUTORS)
def test_a_step_with_the_same_vars_resolves_nothing(path, mode):
    device = CpuDevice()
    runner, asked = Runner(GGUFFile(path), device, mode), []
    runner.prefill([1, 2, 3])
    runner.step(1, "last", "greedy")
    known = device.memory.address
    device.memory.address = lambda buffer: asked.append(buffer) or known(buffer)
    runner.decode(5)
    assert asked == []
