"""The check of a kernel against its reference finds what can be wrong with a kernel."""

import pathlib
import sys
from dataclasses import replace

import numpy as np
import pytest

from llamagraph.gguf.quants import QUANTS
from llamagraph.kernels import all_kernels
from llamagraph.kernels.layouts import type_of
from llamagraph.program.launch import Buffer, Geometry, In, InOut, Out, kernel
from llamagraph.program.target import target_named

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "scripts"))
from checks.examples import examples
from checks.kernels import check_example

TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "U32": "<u4", "U8": "u1",
         "I8": "i1"}


class NumpyGpu:
    """Runs references over one array of bytes. `run` may stand in for a kernel's reference."""

    def __init__(self, run=None):
        self.target, self.run = target_named("sm_90a"), run
        self.memory = self.queue = self
        self.bytes, self.weights = np.zeros(0, np.uint8), {}

    def grow(self, arena, start, stop):
        self.bytes = np.resize(self.bytes, max(len(self.bytes), stop))

    def fill(self, buffer, byte):
        self.bytes[buffer.start : buffer.stop] = byte

    def upload(self, buffer, raw, repack):
        self.weights[buffer.start] = QUANTS[type_of(buffer)].dequantise(raw, buffer.shape)

    def view(self, b):
        if b.dtype not in TYPES or b.layout:
            return self.weights[b.start]
        return np.ndarray(b.shape, TYPES[b.dtype], self.bytes.data, b.start)

    def write(self, buffer, values):
        self.view(buffer)[:] = values

    def read(self, buffer):
        return self.view(buffer).copy()

    def address(self, buffer):
        return buffer

    def bind(self, call):
        return call

    def launch(self, call):
        args = [self.view(a) if isinstance(a, Buffer) else a for a in call.args]
        with np.errstate(all="ignore"):
            (self.run or call.kernel.reference)(*args, **dict(call.kernel.constants))

    def wait(self): ...


@pytest.mark.parametrize("name", sorted(all_kernels()))
def test_references_pass(name):
    for i, example in enumerate(examples(all_kernels()[name])):
        if i % 5 == 0:  # one in five: all of them are for the GPU
            error, fault = check_example(NumpyGpu(), example)
            assert not fault and error == 0, fault


def _example(rng):
    x = rng.standard_normal((4, 8), np.float32)
    yield (x, np.array([3], np.int32), np.zeros(4, np.uint32), np.empty_like(x), 2.0), {}


@kernel("none.cu", geometry=lambda target, *args: Geometry((1, 1, 1), 32), example=_example)
def double(x: In, n_rows: In, counters: InOut, out: Out, factor: float) -> None:
    n = n_rows[0]
    out[:n] = x[:n] * factor


def right(x, n_rows, counters, out, factor):
    double.reference(x, n_rows, counters, out, factor)


def too_many_rows(x, n_rows, counters, out, factor):
    out[:] = x * factor


def not_all_rows(x, n_rows, counters, out, factor):
    out[: n_rows[0] - 1] = x[: n_rows[0] - 1] * factor


def imprecise(x, n_rows, counters, out, factor):
    right(x, n_rows, counters, out, factor * 1.001)


def writes_its_input(x, n_rows, counters, out, factor):
    right(x, n_rows, counters, out, factor)
    x[0, 0] = 7


def leaves_counters(x, n_rows, counters, out, factor):
    right(x, n_rows, counters, out, factor)
    counters[1] = 1


def writes_into_a_gap(x, n_rows, counters, out, factor):
    right(x, n_rows, counters, out, factor)
    np.lib.stride_tricks.as_strided(out, (5, 8), out.strides)[4, 7] = 1


@pytest.mark.parametrize("run, fault", [
    (right, ""),
    (too_many_rows, "out: 8 numbers written beyond the rows"),
    (not_all_rows, "out: 8 of 24 numbers are not finite"),
    (imprecise, "out: 1.0e-03"),
    (writes_its_input, "bytes written in ['x']"),
    (leaves_counters, "counters: 1 of 4 numbers differ"),
    (writes_into_a_gap, "bytes written in a gap"),
])
def test_faults_are_found(run, fault):
    (example,) = examples(replace(double))
    assert fault in (found := check_example(NumpyGpu(run), example)[1])
    assert bool(fault) == bool(found)


def test_a_kernel_that_gives_other_bits_each_time_is_found():
    drift = iter(range(100))

    def run(x, n_rows, counters, out, factor):
        right(x, n_rows, counters, out, factor * (1 + next(drift) * 1e-6))

    (example,) = examples(double)
    assert "other bits" in check_example(NumpyGpu(run), example)[1]
