"""Three tiny kernels and a device to run them on: what `selftest` and `timing` work with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamagraph.devices.cuda import find_gpus
from llamagraph.devices.cuda.compiler import Compiler
from llamagraph.devices.cuda.device import CudaDevice
from llamagraph.program.launch import Buffer, Call, Geometry, In, InOut, Out, dense, kernel

SOURCE = r"""
// Every kernel lets the next one start, and waits before it touches what an earlier one wrote.
__device__ void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
extern "C" __global__ void blend(const float* x, float* y, float a, int n) {
  begin();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = fmaf(a, y[i], x[i]);
}
extern "C" __global__ void gather(const float* x, const float* z, float* y, int n) {
  begin();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] - 2.f * z[i];
}
extern "C" __global__ void empty(const float* x) { begin(); }
"""
N = 1 << 16
BLOCKS = N // 256


def _geometry(target: Any, *args: Any) -> Geometry:
    return Geometry((BLOCKS, 1, 1), 256)


@kernel("self.cu", geometry=_geometry)
def blend(x: In, y: InOut, a: float, n: int) -> None:
    y[:n] = np.float32(a) * y[:n] + x[:n]


@kernel("self.cu", geometry=_geometry)
def gather(x: In, z: In, y: Out, n: int) -> None:
    y[:n] = x[:n] - np.float32(2) * z[:n]


@kernel("self.cu", geometry=_geometry)
def empty(x: In) -> None:
    """Nothing."""


class Bench:
    """A device with the tiny kernels, two inputs and a few outputs of N floats."""

    def __init__(self, folder: Path):
        (folder / "self.cu").write_text(SOURCE)
        gpu = find_gpus()[0]
        self.compiler = Compiler(gpu.arch, folder / "cache", folder)
        self.device = CudaDevice(gpu, self.compiler, print)
        self.pdl = self.device.target.pdl
        self.device.memory.reserve("scratch", 1 << 30)
        self.device.memory.grow("scratch", 0, 8 * 4 * N)
        self.x, self.z, self.y, *self.others = (
            dense(f"b{i}", "scratch", 4 * N * i, (N,)) for i in range(8)
        )
        rng = np.random.default_rng(1)
        self.values = {b: rng.standard_normal(N, np.float32) for b in (self.x, self.z)}
        for buffer, values in self.values.items():
            self.device.memory.write(buffer, values)

    def bind(self, what: Any, *args: Any, pdl: bool | None = None, block: int = 256,
             grid: int = BLOCKS) -> Any:
        address = self.device.memory.address
        values = tuple(address(a) if isinstance(a, Buffer) else a for a in args)
        early = self.pdl if pdl is None else pdl
        return self.device.queue.bind(Call(what, (grid, 1, 1), block, 0, values, early))

    def chain(self, factors: Sequence[float], pdl: bool | None = None) -> list[Any]:
        """y = a*y + x, again and again; the order shows in the result."""
        return [self.bind(blend, self.x, self.y, a, N, pdl=pdl) for a in factors]

    def expected(self, factors: Sequence[float]) -> np.ndarray:
        y = np.zeros(N, np.float32)
        for a in factors:
            y = np.float32(a) * y + self.values[self.x]
        return y

    def clear(self) -> None:
        self.device.memory.fill(self.y, 0)

    def launch_all(self, bound: Sequence[Any]) -> list[Any]:
        return [self.device.queue.launch(b) for b in bound]

    def result(self) -> np.ndarray:
        return self.device.memory.read(self.y)


def error(out: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


FACTORS = tuple(0.9 if i % 3 else -0.8 for i in range(60))
