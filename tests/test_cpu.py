"""The numpy device: how many BLAS threads it takes, and that models follow each other on it."""

from itertools import cycle

import pytest
from tiny import tiny_model

from llamagraph.devices.cpu import CpuDevice
from llamagraph.devices.host import MOST_THREADS, idle_cores
from llamagraph.gguf.reader import GGUFFile
from llamagraph.runner import Runner


@pytest.mark.parametrize("cores, running, expected", [
    (2, [1], 2), (2, [2], 1), (2, [9], 1), (2, [1, 1, 3], 2), (4, [1, 2, 2], 3),
    (64, [1], MOST_THREADS), (1, [1], 1),
])
def test_threads_are_the_idle_cores(cores, running, expected):
    samples = cycle(running)
    assert idle_cores(cores, lambda: next(samples)) == expected


def test_a_system_that_does_not_say_gets_one():
    def unknown():
        raise FileNotFoundError

    assert idle_cores(8, unknown) == 1


def test_a_number_that_is_given_is_taken():
    device = CpuDevice(n_threads=2)
    assert device.n_threads == 2
    device.close()


def test_a_model_takes_the_place_of_the_one_before(tmp_path):
    device, used = CpuDevice(), []
    for n_layer in (4, 1):
        Runner(GGUFFile(tiny_model(tmp_path / f"{n_layer}.gguf", n_layer=n_layer)), device)
        used.append(device.memory.account()["weights"])
    fresh = CpuDevice()
    Runner(GGUFFile(tmp_path / "1.gguf"), fresh)
    assert used[1] == fresh.memory.account()["weights"] < used[0]
