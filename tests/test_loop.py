"""Loops: the tokens of the other modes, ended by the device, the limit, the context or the host."""

import numpy as np
import pytest
from tiny import ARCHITECTURES, N_VOCAB, tiny_model

import llamagraph
from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import DeviceError, LlamaGraphError
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.step import MAX_EOG
from llamagraph.model import Model
from llamagraph.runner import LOOP_STEPS, Runner
from llamagraph.sampling import SamplingParams

GREEDY = SamplingParams(temp=0, seed=0)
DRAWN = SamplingParams(seed=7, temp=1.5, top_k=0, top_p=1, min_p=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", n_ctx=LOOP_STEPS + 600)


class Counting(CpuDevice):
    """Counts replays, and how often loops ran."""

    def __init__(self):
        super().__init__()
        self.replays = self.steps = 0
        replay, repeat = self.graphs.replay, self.graphs._repeat

        def count(graph):
            self.replays += 1
            replay(graph)

        def steps(*args):
            for _ in repeat(*args):
                self.steps += 1
                yield

        self.graphs.replay, self.graphs._repeat = count, steps


def looped(path):
    return Runner(GGUFFile(path), Counting(), "loop")


def streamed(path, prompt, params, limit):
    return list(Runner(GGUFFile(path), CpuDevice()).generate(prompt, params, limit))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_answers_are_those_of_the_stream(tmp_path, arch):
    """One after another on the same model: by limit, end of text, stop string and context."""
    path = tiny_model(tmp_path / "m.gguf", arch, n_ctx=96, n_layer=3)
    hot = {"temp": 3, "top_k": 0, "top_p": 1, "min_p": 0}
    asked = [{"temp": 0, "limit": 30}, {"seed": 3, "limit": 30}, {"temp": 0, "limit": 1},
             {"temp": 0, "ignore_eos": True}, *({"seed": s, **hot} for s in range(6)),
             {"seed": 2, **hot, "ignore_eos": True}]
    found = {}
    for mode in ("stream", "loop"):
        with llamagraph.open(path, device=CpuDevice(), mode=mode) as model:
            found[mode] = []
            for options in asked:
                for stop in ((), "e", "lo"):
                    answer = model.generate("hello world", stop=stop, **options)
                    found[mode].append(([*answer], answer.text, answer.stop_reason))
    assert found["loop"] == found["stream"]
    assert {"limit", "context", "stop", "eog"} == {reason for _, _, reason in found["loop"]}


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_limited_answer_is_one_launch(path, params):
    runner = looped(path)
    assert list(runner.generate([1, 2, 3], params, 300)) == streamed(path, [1, 2, 3], params, 300)
    assert runner.device.replays == 2 and runner.device.steps == 299  # the prompt chose the first


def test_an_answer_without_a_limit_takes_memory_as_it_grows(path):
    runner = looped(path)
    answer = runner.generate([1, 2, 3], GREEDY)
    next(answer)
    bound = runner.kv.bytes_at(3 + LOOP_STEPS + 255)
    assert runner.device.memory.account()["kv"] <= bound < runner.kv.bytes_at(runner.n_ctx)
    n = 1 + sum(1 for _ in answer)
    assert n == runner.n_ctx - 2 and runner.device.replays == 3


@pytest.mark.parametrize("prompt, limit", [([1, 2, 3], 300), ([1], 20), ([1] * 520, -1)])
def test_what_is_prepared_is_what_runs(path, prompt, limit):
    """Nothing is made and nothing is updated once the first token is computed."""
    with Model(GGUFFile(path), Counting(), "loop", len(prompt) + 400) as model:
        answer, executors = model.generate(prompt, temp=0, limit=limit), model.runner.executors
        answer.prepare()
        made = executors.made
        n = sum(1 for _ in answer)
        assert n > 15 and executors.made == made == len(executors)
        assert not any(e.updates for e in executors.values() if e.program.key.repeats)
        assert [e for e in executors.values() if e.program.key.repeats]


def test_a_full_cache_makes_a_loop_anew(path):
    """Nothing is updated whole to a loop, and no loop to something else."""
    runner, closed = looped(path), []
    runner.executors.limit = 1
    close = runner.device.graphs.close
    runner.device.graphs.close = lambda graph: (closed.append(graph), close(graph))
    for limit in (20, 1, 30):
        runner.reset()
        expected = streamed(path, [1, 2, 3], GREEDY, limit)
        assert list(runner.generate([1, 2, 3], GREEDY, limit)) == expected
    assert len({id(graph) for graph in closed}) == runner.executors.made - 1 == 3


@pytest.mark.parametrize("n_eog", [1, MAX_EOG + 5])
def test_the_device_ends_at_a_token(path, n_eog):
    """Also where it does not know all of them: the host sees the others."""
    whole = streamed(path, [1, 2, 3], DRAWN, 200)
    eog = list(dict.fromkeys(whole[20:]))[:n_eog]
    first = next(i for i, token in enumerate(whole) if token in eog)
    runner = looped(path)
    assert list(runner.generate([1, 2, 3], DRAWN, 200, eog=eog)) == whole[: first + 1]
    assert runner.device.steps <= first + 1 and runner.n_past == 3 + first
    assert list(runner.generate([whole[first]], DRAWN, 5))  # and it can go on


def test_the_host_ends_it(path):
    """One more step runs at most, and the sequence is what was handed out."""
    runner = looped(path)
    answer = runner.generate([1, 2, 3], GREEDY, 500)
    tokens = [next(answer) for _ in range(40)]
    answer.close()
    assert runner.device.steps <= 41 and runner._stop[0] == 0
    assert runner.sequence == [1, 2, 3, *tokens[:-1]] and runner.n_past == 42
    assert list(runner.generate([tokens[-1]], GREEDY, 5)) == streamed(
        path, [1, 2, 3], GREEDY, 45)[40:]


@pytest.mark.parametrize("close", [Runner.close, Runner.close_executors])
def test_closing_ends_a_loop(path, close):
    """Before its graph is closed, with the step that it is in."""
    runner, running = looped(path), []
    close_graph = runner.device.graphs.close
    runner.device.graphs.close = lambda graph: (running.append(next(runner.device.queue.loop, 0)),
                                                close_graph(graph))
    answer = runner.generate([1, 2, 3], GREEDY, 500)
    next(answer)
    next(answer)
    close(runner)
    assert runner.device.steps < 5 and set(running) == {0} and len(running) == 2
    runner.close()
    runner.close()
    with pytest.raises(LlamaGraphError, match="another answer"):
        next(answer)


def test_what_is_seen_or_chosen_by_the_host_goes_step_by_step(path):
    runner, seen = looped(path), []
    tokens = list(runner.generate([1, 2, 3], GREEDY, 6, lambda executor: seen.append(
        int(np.argmax(runner.read_logits(executor)[0])))))
    assert seen == tokens and runner.device.replays == 6


def test_logits_are_the_streams(path):
    runner, other = looped(path), Runner(GGUFFile(path), CpuDevice())
    prompt = list(range(40))
    assert np.array_equal(runner.logits(prompt), other.logits(prompt))
    found = [r.read_logits(r.decode(20)) for r in (runner, other)]
    assert found[0].shape == (1, N_VOCAB) and np.array_equal(*found)


def test_where_there_are_no_loops_a_graph_is_launched_a_token(path):
    device, said = Counting(), []
    device.graphs.no_loop = "the driver is too old"
    runner = Runner(GGUFFile(path), device, "loop", warn=said.append)
    assert list(runner.generate([1, 2, 3], GREEDY, 9)) == streamed(path, [1, 2, 3], GREEDY, 9)
    assert said == ["no loop: the driver is too old; launching a graph a token"]
    assert runner.mode == "capture" and device.steps == 0 and device.replays == 9
    assert not any(e.program.key.repeats for e in runner.executors.values())


def test_a_loop_that_was_prepared_for_nothing_loads_no_kernel_of_it(path):
    device, loaded, said = Counting(), [], []
    device.graphs.no_loop = "the driver is too old"
    device.queue.load = lambda kernels: loaded.extend(k.name for k in kernels)
    with Model(GGUFFile(path), device, "loop", warn=said.append) as model:
        answer = model.generate([1, 2, 3], temp=0, limit=9)
        answer.prepare()
        assert len(list(answer)) == 9 and len(said) == 1
    assert "embed_rows" in loaded and "loop_control" not in loaded


def test_a_loop_that_is_refused_when_it_is_made_goes_the_same_way(path):
    def refuse(*_):
        raise DeviceError("adding a loop to a graph: not permitted")

    device, said = Counting(), []
    device.graphs.build = refuse
    runner = Runner(GGUFFile(path), device, "loop", warn=said.append)
    assert len(list(runner.generate([1, 2, 3], GREEDY, 9))) == 9
    assert said == ["no loop: adding a loop to a graph: not permitted; launching a graph a token"]
