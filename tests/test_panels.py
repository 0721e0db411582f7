"""Panels: where each number is, and that nothing is lost but what F16 cannot hold."""

import numpy as np

from llamagraph.kernels.panels import COLUMNS, from_panels, in_panels


def test_panels_hold_the_rows_as_halves():
    x = np.random.default_rng(0).standard_normal((21, 192), np.float32)
    panels = in_panels(x)
    assert panels.shape == (3, 21, COLUMNS) and panels.dtype == np.float16
    assert np.array_equal(from_panels(panels), x.astype(np.float16))


def test_a_number_is_where_the_kernels_look_for_it():
    """csrc/panels.cuh: pairs in pieces of 8, which are swapped by the row."""
    x = np.arange(10 * 128, dtype=np.float32).reshape(10, 128)
    panels = in_panels(x)
    for row, column in ((0, 0), (3, 5), (9, 77), (7, 127)):
        piece = column % 64 // 16 * 2 + column % 4 // 2
        at = (piece ^ row % 8) * 8 + column % 16 // 4 * 2 + column % 2
        assert panels[column // 64, row, at] == x[row, column]


def test_large_numbers_are_cut_off():
    assert from_panels(in_panels(np.full((1, 64), -1e9, np.float32))).min() == -65504
