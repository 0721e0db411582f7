"""How many BLAS threads the numpy device takes."""

from itertools import cycle

import pytest

from llamagraph.devices.cpu import CpuDevice
from llamagraph.devices.host import MOST_THREADS, idle_cores


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
