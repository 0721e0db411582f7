"""What is measured of a step: on a device whose clock is known, all times come out exactly."""

from functools import partial

import numpy as np
import pytest
from tiny import tiny_model

from llamagraph.bench import Subject
from llamagraph.bench_anatomy import anatomy, comparisons
from llamagraph.bench_result import Case
from llamagraph.devices.cpu import CpuDevice, CpuQueue
from llamagraph.gguf.reader import GGUFFile

COSTS = {"fill_words": 1.0, "linear_rows": 50.0, "attention_decode": 20.0, "stamp": 2.0}  # seconds
OTHERS = 5.0


class ClockedQueue(CpuQueue):
    """Every launch takes what its kernel costs, by a clock of its own; the host never waits."""

    ahead = True

    def __init__(self, memory):
        super().__init__(memory)
        self.clock = 0.0

    def bind(self, call):
        return partial(self._run, super().bind(call), COSTS.get(call.kernel.name, OTHERS))

    def _run(self, bound, cost):
        self.clock += cost
        bound()
        if bound.call.kernel.name == "stamp":
            times, count = bound.args
            times.view(np.uint64)[count[0] - 1] = int(1e9 * self.clock)

    def time(self, work):
        before = self.clock
        work()
        return self.clock - before


class ClockedDevice(CpuDevice):
    def __init__(self):
        super().__init__()
        self.queue = self.graphs._queue = ClockedQueue(self.memory)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return GGUFFile(tiny_model(tmp_path_factory.mktemp("models") / "m.gguf"))


def test_every_launch_has_its_own_time_and_the_step_their_sum(file):
    subject = Subject(file, ClockedDevice(), 300, probe_bytes=1 << 20)
    found = anatomy(subject, Case(0, 8), timeline=True)
    program = subject.runner.executors.values()[0].program
    assert [t.label for t in found.timeline] == [launch.label for launch in program.launches]
    for t in found.timeline:
        assert t.ns == pytest.approx(1e9 * COSTS.get(t.kernel, OTHERS)), t
    assert found.step_ns == pytest.approx(sum(t.ns for t in found.timeline))
    assert found.gap_ns == pytest.approx(1e9) and found.n_launches == len(found.timeline)
    assert found.busy_ns == pytest.approx(found.step_ns - 1e9 * found.n_launches)
    assert found.driver_ns is None
    subject.close()


def test_measuring_leaves_no_trace_in_the_sequence(file):
    """Launches replayed behind whole steps move nothing on; later cases choose what they would."""
    cases = [Case(0, 8, 250), Case(0, 8, 250), Case(0, 6, 20)]
    found = list(comparisons(file, ClockedDevice(), cases, ["stream", "build"], 1, timeline=True,
                             probe_bytes=1 << 20))
    tokens = [[r.last_token for r in c.rows] for c in found]
    assert tokens[0] == tokens[1]
    alone = list(comparisons(file, CpuDevice(), cases[2:], ["stream"], 1, timeline=True,
                             probe_bytes=1 << 20))
    assert tokens[2] == [alone[0].stream.last_token] * 2
    assert len(alone[0].anatomy.timeline) == alone[0].anatomy.n_launches


def test_a_case_of_one_step_is_enough(file):
    (found,) = comparisons(file, CpuDevice(), [Case(0, 1)], ["stream", "capture"], 1,
                           timeline=True, probe_bytes=1 << 20)
    assert len(found.anatomy.timeline) == found.anatomy.n_launches and found.anatomy.step_ns > 0
