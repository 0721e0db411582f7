"""Loops on the GPU: a whole answer in one launch, with the tokens that the other modes choose.

What it costs the host, how soon it ends when it must, that it can be long, and its speed. Synthetic
models need no file; the answers of a real one are compared where its file is given.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import llamagraph
from checks.parity import random_tokens
from checks.report import Report
from llamagraph.bench import Case, bench
from llamagraph.chat import user_turn
from llamagraph.devices import open_device
from llamagraph.execute import EXECUTORS
from llamagraph.gguf.synthetic import SyntheticFile
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams

SMALL, N_CTX = "135m:q8_0", 12288
MODES = ("capture", "build", "loop")
MODELS = ("135m:q8_0", "1b:q4_k_m", "8b:q4_k_m")
GREEDY = SamplingParams(temp=0, seed=0)
CHOICES = (GREEDY, *(SamplingParams(seed=seed) for seed in range(3)))
N_PROMPTS = 20
LONG = 10_000  # tokens of one launch
HOST_LIMIT = 5e-6  # seconds of the host's processor a token
END_LIMIT = 0.05  # seconds from the wish to the end
THINGS = ("the sky", "a cat", "bread", "the moon", "money", "rain", "a prime number", "music",
          "glass", "the sea", "a bicycle", "gravity", "salt", "a poem", "sleep", "iron", "tea",
          "an algorithm", "the heart", "snow")


def open_runner(mode: str) -> Runner:
    return Runner(SyntheticFile(SMALL), open_device("cuda", warn=print), mode, N_CTX)


def texts(runner: Runner, eog: set[int], limit: int = 48) -> list[list[int]]:
    """Answers to prompts of 1, 4, 7, ... random tokens, chosen in every way."""
    found = []
    for i in range(N_PROMPTS):
        for params in CHOICES:
            runner.reset()
            prompt = random_tokens(runner, 1 + 3 * i, i)
            found.append(list(runner.generate(prompt, params, limit, eog=eog)))
    return found


def check_tokens(looping: Runner, captured: Runner, report: Report) -> None:
    """With and without tokens that end an answer; then as many as the context holds."""
    whole = texts(captured, set())
    report.add("loop", f"tokens of {len(whole)} answers", texts(looping, set()) == whole)
    eog = {text[-20] for text in whole[::3]}
    cut = texts(captured, eog)
    n = sum(len(a) < len(b) for a, b in zip(cut, whole, strict=True))
    report.add("loop", "tokens where one of them ends the answer", texts(looping, eog) == cut,
               f"{n} ended early")
    ends = []
    for runner in (captured, looping):
        runner.reset()
        prompt = random_tokens(runner, N_CTX - 1500)
        ends.append(list(runner.generate(prompt, GREEDY)))
    report.add("loop", "tokens to the end of the context", ends[0] == ends[1],
               f"{len(ends[0])} tokens")


def answers(path: Path, mode: str) -> list[tuple[list[int], Any, str]]:
    with llamagraph.open(path, device="cuda", mode=mode, warn=print) as model:
        found = []
        for thing in THINGS:
            prompt = user_turn(model.tokenizer, f"Say in one sentence what {thing} is.", None)
            for params in CHOICES:
                answer = model.generate(prompt, limit=96, temp=params.temp, seed=params.seed,
                                        stop=" of the")
                found.append((list(answer), answer.stop_reason, answer.text))
    return found


def check_answers(path: Path, report: Report) -> None:
    captured, looped = (answers(path, mode) for mode in ("capture", "loop"))
    reasons = [reason for _, reason, _ in captured]
    counts = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
    report.add("loop", f"{len(captured)} answers of {path.name}", captured == looped, f"{counts}")


def check_graph(runner: Runner, report: Report) -> None:
    """The body as the driver has it. A launch that follows several waits for them whole."""
    runner.reset()
    runner.prefill(random_tokens(runner, 16))
    executor = runner.decode(2)
    graphs: Any = runner.device.graphs
    nodes = graphs.read_back(executor._graph)
    edges = [early for node in nodes for _, early in node.after]
    early = sum(len(node.after) == 1 for node in nodes) * runner.device.target.pdl
    report.add("loop", "nodes and edges of the body",
               nodes[-1].function == "loop_control" and sum(edges) == early,
               f"{len(nodes)} nodes, {len(edges)} edges, {sum(edges)} of them programmatic")


def check_host(runner: Runner, report: Report, n: int = 2000) -> None:
    """All of an answer but its text, the prompt and the launch included."""
    prompt = random_tokens(runner, 16)
    for _ in range(2):  # the first makes the graphs
        runner.reset()
        wall, used = time.perf_counter(), time.process_time()
        produced = sum(1 for _ in runner.generate(prompt, SamplingParams(seed=1), n))
        wall, used = time.perf_counter() - wall, time.process_time() - used
    report.add("loop", "host's processor a token", produced == n and used / n <= HOST_LIMIT,
               f"{used / n * 1e6:.2f} us of {wall / n * 1e6:.0f} us")


def check_end(runner: Runner, report: Report) -> None:
    """The reader goes away; then Ctrl-C."""
    prompt = random_tokens(runner, 16)
    runner.reset()
    answer = runner.generate(prompt, GREEDY, LONG)
    for _ in range(100):
        next(answer)
    started = time.perf_counter()
    answer.close()
    took = time.perf_counter() - started
    report.add("loop", "end when the reader goes away", took < END_LIMIT, f"{took * 1e3:.2f} ms")
    again = list(runner.generate(random_tokens(runner, 5, 1), GREEDY, 8))
    report.add("loop", "the next answer", len(again) == 8)
    runner.reset()
    sent = 0.0

    def interrupt() -> None:
        nonlocal sent
        sent = time.perf_counter()
        signal.raise_signal(signal.SIGINT)

    timer = threading.Timer(0.3, interrupt)
    timer.start()
    try:
        n = sum(1 for _ in runner.generate(prompt, GREEDY, LONG))
    except KeyboardInterrupt:
        took, n = time.perf_counter() - sent, 0
    finally:
        timer.cancel()
    report.add("loop", "end after Ctrl-C", not n and took < END_LIMIT, f"{took * 1e3:.2f} ms")


def check_interrupt(path: Path, mode: str, report: Report) -> None:
    """Ctrl-C on the command line: the answer's end at its reader, and that of the process."""
    command = [sys.executable, "-m", "llamagraph", "run", "-m", str(path), "--graph-mode", mode,
               "--ignore-eos", "-s", "1", "-p", "Tell me a long story."]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout and running.stderr
    running.stdout.read(1000)
    started = time.perf_counter()
    running.send_signal(signal.SIGINT)
    text = running.stdout.read()
    ended = time.perf_counter() - started
    said, code = running.stderr.read(), running.wait()
    gone = time.perf_counter() - started
    report.add("loop", f"Ctrl-C on the command line, {mode}", ended < END_LIMIT and code == 130 and
               text.endswith(b"\n") and b"t/s" in said,
               f"the answer ends after {ended * 1e3:.1f} ms, the process after {gone * 1e3:.1f} ms")


@contextmanager
def counted(graphs: Any) -> Iterator[list[Any]]:
    """The replays meanwhile."""
    replay, seen = graphs.replay, []

    def count(graph: Any) -> None:
        seen.append(graph)
        replay(graph)

    graphs.replay = count
    try:
        yield seen
    finally:
        del graphs.replay


def check_long(runner: Runner, report: Report) -> None:
    prompt, memory = random_tokens(runner, 16), runner.device.memory
    runner.reset()
    with counted(runner.device.graphs) as replays:
        answer = runner.generate(prompt, SamplingParams(seed=2), LONG)
        next(answer)
        free = [memory.available()]
        started = time.perf_counter()
        for i, _ in enumerate(answer):
            if i % 1000 == 0:
                free.append(memory.available())
        took = time.perf_counter() - started
    free.append(memory.available())
    report.add("loop", f"{LONG} tokens", len(replays) == 2 and len(set(free)) == 1,
               f"in {len(replays) - 1} launch behind the prompt's, {took / LONG * 1e6:.0f} us a "
               f"token, free memory changes by {max(free) - min(free)} bytes")


def check_speed(spec: str, report: Report) -> None:
    """A decode of 512 tokens by bench."""
    with closing(open_device("cuda", warn=print)) as device:
        found = list(bench(SyntheticFile(spec), device, [Case(0, 512)], MODES, 5))
    times = ", ".join(f"{r.graph_mode} {r.avg_ns / 512e3:.1f} us" for r in found)
    report.add("loop", f"a token of 512, {spec}", len({r.last_token for r in found}) == 1,
               f"{times}; {found[-1].n_nodes} nodes, {found[-1].prepare_ms:.1f} ms to make")


def run(report: Report, path: Path | None) -> None:
    with closing(open_runner("loop")) as runner:
        with report.check("loop", "tokens"), closing(open_runner("capture")) as captured:
            check_tokens(runner, captured, report)
        for check in (check_graph, check_host, check_end, check_long):
            with report.check("loop", check.__name__):
                check(runner, report)
    if path:
        with report.check("loop", "answers"):
            check_answers(path, report)
        for mode in EXECUTORS:
            with report.check("loop", f"Ctrl-C, {mode}"):
                check_interrupt(path, mode, report)
    for spec in MODELS:
        with report.check("loop", spec):
            check_speed(spec, report)
