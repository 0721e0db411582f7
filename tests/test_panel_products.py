"""What the products of panels have in common: references near what they stand for."""

import numpy as np
import pytest

from llamagraph.kernels.examples import numpy_args
from llamagraph.kernels.gemm_hopper import hopper_gated, hopper_rows
from llamagraph.kernels.gemm_warps import warps_gated, warps_rows
from llamagraph.kernels.panels import from_panels


@pytest.mark.parametrize("kernel", [hopper_rows, warps_rows], ids=lambda k: k.name)
def test_the_reference_is_near_the_exact_product(kernel):
    for args, constants in kernel.example(np.random.default_rng(0)):
        w, x, n_rows, out, *_ = args = numpy_args(args)
        kernel.reference(*args, **constants)
        n = n_rows[0]
        exact = from_panels(x)[:n].astype(np.float64) @ w.T.astype(np.float64)
        assert np.linalg.norm(out[:n] - exact) < 1e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("kernel", [hopper_gated, warps_gated], ids=lambda k: k.name)
def test_gate_and_up_come_out_in_panels(kernel):
    args, constants = next(iter(kernel.example(np.random.default_rng(0))))
    gate, up, x, _, out, *_ = args = numpy_args(args)
    kernel.reference(*args, **constants)
    rows = from_panels(x)
    g, u = rows @ gate.T, rows @ up.T
    assert np.allclose(from_panels(out), g / (1 + np.exp(-g)) * u, rtol=1e-2, atol=1e-2)
