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


def test_a_choice_on_the_host_is_the_devices(path):
    """A GPU ranks at most 128 candidates: with all of them the host chooses, by the same chain."""
    params = SamplingParams(top_k=0, temp=1.5, repeat_penalty=1.2, logit_bias={7: 2.0}, seed=5)
    gpu, cpu = target_named("sm_90a"), target_named("numpy")
    assert params.sampler(gpu, 269) == "host" and params.sampler(cpu, 269) == "chain"
    expected = run(path, "stream", params=params, n=60)[0]
    on_host = HostChoice(**vars(params))
    assert all(run(path, mode, params=on_host, n=60)[0] == expected for mode in EXECUTORS)


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
    def __init__(self, key, closed):
        self.key, self.closed = key, closed

    def close(self):
        self.closed.append(self.key.rows)


def test_the_cache_is_bounded_and_closes_the_least_recently_used():
    closed = []
    cache = ExecutorCache(lambda key: Closing(key, closed), limit=2)
    for rows in (1, 2, 1, 3, 1):
        cache[StepKey(rows=rows)]
    assert closed == [2] and len(cache) == 2 and cache.made == 3
    cache.close()
    assert sorted(closed) == [1, 2, 3]


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
