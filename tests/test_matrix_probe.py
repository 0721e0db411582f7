"""The ceiling of products: what is multiplied, and that the time of it is taken."""

import numpy as np

from llamagraph.devices import open_device
from llamagraph.kernels.matrix_probe import (
    COLUMNS,
    OUTPUTS,
    ROWS,
    matrix_ceiling,
    multiply_all,
    numbers,
)
from llamagraph.program.launch import Work, dense


def test_its_numbers_are_halves_of_both_signs():
    x = numbers(7, 100)
    assert x.shape == (100, COLUMNS) and np.array_equal(x, x.astype(np.float16))
    assert x[0, 1] == (8 * 2654435761 % 2**32 >> 22) / 512 - 1
    assert -1 <= x.min() < -0.9 and 0.9 < x.max() < 1 and abs(x.mean()) < 0.05


def test_a_block_multiplies_as_often_as_it_is_told():
    out = np.empty((2, OUTPUTS, ROWS), np.float32)
    multiply_all.reference(out, 3)
    exact = numbers(0, OUTPUTS) @ numbers(OUTPUTS * COLUMNS, ROWS).T
    assert np.allclose(out, 3 * exact)
    buffer = dense("out", "probe", 0, out.shape)
    assert multiply_all.flops(Work(), buffer, 3) == 2 * 2 * 3 * 64 * 256 * 64


def test_the_ceiling_of_a_cpu():
    device = open_device("cpu", warn=print)
    assert 1e8 < matrix_ceiling(device) < 1e14
    assert device.memory.account().get("probe", 0) == 0
