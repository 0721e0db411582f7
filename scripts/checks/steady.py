"""One executable over a long life: updates, depth classes, and a KV cache that grows under it.

Uses a synthetic model of real shapes, whose context is long; needs no file.
"""

from contextlib import closing

from checks.parity import random_tokens
from checks.report import Report
from llamagraph.devices import open_device
from llamagraph.gguf.synthetic import SyntheticFile
from llamagraph.kernels.attention import attention_class
from llamagraph.program.launch import StepKey
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams

MODEL, N_CTX = "1b:q4_k_m", 131072


def holders(runner: Runner, kv_len: int) -> list[str]:
    """Labels of the decode step's launches that hold a variable."""
    executor = runner.executors[StepKey(attention=attention_class(kv_len))]
    return [launch.label for launch in executor.program.launches if launch.vars()]


def decode(runner: Runner, n: int, sampler: str = "greedy") -> int:
    """How many launches were updated over n steps."""
    before = sum(e.updates for e in runner.executors.values())
    for _ in range(n):
        runner.step(1, "last", sampler)
    runner.device.queue.wait()
    return sum(e.updates for e in runner.executors.values()) - before


def start_at(runner: Runner, n: int) -> None:
    """A sequence of n tokens, and one decode step behind it, so that its program is there."""
    runner.reset()
    runner.prefill(random_tokens(runner, n))
    decode(runner, 1)


def check_updates(runner: Runner, report: Report) -> None:
    start_at(runner, 1100)
    report.add("steady", "512 tokens from 1101 on", (n := decode(runner, 512)) == 0, f"{n} updates")
    start_at(runner, 1000)
    labels, n = holders(runner, 1000), decode(runner, 40)
    report.add("steady", "crossing position 1024",
               n == len(labels) and all(x.endswith(".attn") for x in labels),
               f"{n} updates of {labels[0]} to {labels[-1]}")


def check_depths(runner: Runner, report: Report) -> None:
    """100, then 20 000, then 100: another attention, and none is captured twice."""
    counts = []
    for depth in (100, 20_000, 100, 20_000):
        start_at(runner, depth)
        counts.append(runner.executors.made)
    classes = {attention_class(d) for d in (100, 20_000)}
    report.add("steady", "depths 100, 20 000, 100, 20 000",
               counts[1:] == [counts[1]] * 3 and classes == {"short", "long"},
               f"executables made: {counts}")


def addresses_of(runner: Runner) -> list[int]:
    memory = runner.device.memory
    return [memory.address(b) for layer in runner.kv.layers for b in (layer.k, layer.v)]


def check_growth(runner: Runner, report: Report) -> None:
    """Decode steps at positions up to the last: pages are mapped, nothing is captured or moved."""
    start_at(runner, 1)
    start_at(runner, 20_000)
    memory, made = runner.device.memory, runner.executors.made
    addresses = addresses_of(runner)
    runner.reset()
    used = [memory.account()["kv"]]
    for position in (*range(0, N_CTX - 1, 509), N_CTX - 1):
        runner.n_past = position
        memory.write(runner.io["pos"], [position])
        runner.step(1, "last", "greedy")
    runner.device.queue.wait()
    used.append(memory.account()["kv"])
    same = addresses == addresses_of(runner)
    report.add("steady", "KV up to position 131 071", same and runner.executors.made == made,
               f"{used[0] >> 20} to {used[1] >> 20} MiB, no capture, no pointer changed")


def check_first_pages(report: Report) -> None:
    with closing(open_runner()) as runner:
        runner.prefill([1])
        used, reserved = runner.device.memory.account()["kv"], runner.kv.n_bytes
        report.add("steady", "KV that is mapped at the start", used < 0.03 * reserved,
                   f"{used >> 20} of {reserved >> 20} MiB")


def check_repetition(runner: Runner, report: Report) -> None:
    """The same long answer twice, drawn with one seed."""
    answers = []
    for _ in range(2):
        runner.reset()
        SamplingParams(seed=1).write(runner.device.memory, runner.io)
        runner.prefill(random_tokens(runner, 16), "chain")
        decode(runner, 10_000, "chain")
        answers.append(runner.device.memory.read(runner.io["tokens"])[:10_000].tolist())
    report.add("steady", "10 000 tokens twice, seed 1", answers[0] == answers[1],
               f"{len(set(answers[0]))} different tokens")


def open_runner() -> Runner:
    return Runner(SyntheticFile(MODEL), open_device("cuda", warn=print), "capture", N_CTX)


def run(report: Report) -> None:
    with report.check("steady", "first pages"):
        check_first_pages(report)
    with closing(open_runner()) as runner:
        for check in (check_updates, check_depths, check_growth, check_repetition):
            with report.check("steady", check.__name__):
                check(runner, report)
