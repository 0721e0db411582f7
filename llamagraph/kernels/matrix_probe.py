"""How fast matrices can be multiplied: the ceiling that reading prompts is measured against.

Part of no step. Knows a device's memory and queue, no model.
"""

import statistics

import numpy as np

from llamagraph.kernels.linear import linear_rows
from llamagraph.program.device import Device
from llamagraph.program.launch import Buffer, Geometry, Launch, Out, Traffic, Work, dense, kernel
from llamagraph.program.plan import ALIGNMENT
from llamagraph.program.target import Target

OUTPUTS, ROWS, COLUMNS = 64, 256, 64  # of a block's product
BLOCKS_PER_SM = 2
ROUNDS = 2000  # of a launch: some milliseconds
SAMPLES = 5


def numbers(first: int, rows: int) -> np.ndarray:
    """float32 (rows, COLUMNS): hashes of `first` on as multiples of 1/512, from -1 on."""
    hashed = np.arange(first, first + rows * COLUMNS, dtype=np.uint32) * np.uint32(2654435761)
    return (hashed >> np.uint32(22)).reshape(rows, COLUMNS).astype(np.float32) / 512 - 1


def _geometry(target: Target, out: Buffer, n_rounds) -> Geometry:
    return Geometry((out.shape[0], 1, 1), 128)


def _cost(work: Work, out: Buffer, n_rounds: int) -> Traffic:
    return Traffic(0, out.n_bytes)


def _flops(work: Work, out: Buffer, n_rounds: int) -> int:
    return 2 * out.shape[0] * n_rounds * OUTPUTS * ROWS * COLUMNS


def _example(rng):
    for n_blocks, n_rounds in ((1, 1), (3, 5)):
        yield (np.empty((n_blocks, OUTPUTS, ROWS), np.float32), n_rounds), {}


@kernel("matrix_probe.cu", geometry=_geometry, cost=_cost, flops=_flops, example=_example)
def multiply_all(out: Out, n_rounds: int) -> None:
    """out[b] = n_rounds times the product of one matrix with the transpose of another.

    out: (n_blocks, OUTPUTS, ROWS). The matrices are `numbers`, on tensor cores as F16.
    """
    out[:] = n_rounds * (numbers(0, OUTPUTS) @ numbers(OUTPUTS * COLUMNS, ROWS).T)


def matrix_ceiling(device: Device) -> float:
    """Multiplications and additions a second of products on the device; a median.

    On a GPU of F16 with F32 sums, all operands at hand; on a CPU of F32, as its prompts are read.
    """
    n_rows = dense("n_rows", "probe", 0, (1,), "I32")
    launch, n_bytes = _of_gpu(device.target) if device.target.is_cuda else _of_cpu(n_rows)
    device.memory.reserve("probe", n_bytes)
    try:
        device.memory.grow("probe", 0, n_bytes)
        device.memory.write(n_rows, [ROWS])
        bound = device.queue.bind(launch.resolve({}, device.memory.address))
        device.queue.launch(bound)
        seconds = [device.queue.time(lambda: device.queue.launch(bound)) for _ in range(SAMPLES)]
        return launch.flops(Work(n_rows=ROWS)) / statistics.median(seconds)
    finally:
        device.memory.reserve("probe", 0)


def _of_gpu(target: Target) -> tuple[Launch, int]:
    out = dense("out", "probe", ALIGNMENT, (BLOCKS_PER_SM * target.n_sm, OUTPUTS, ROWS))
    return Launch(multiply_all, _geometry(target, out, ROUNDS), (out, ROUNDS), "probe"), out.stop


def _of_cpu(n_rows: Buffer) -> tuple[Launch, int]:
    weight = dense("weight", "probe", ALIGNMENT, (1024, 1024))
    x = dense("x", "probe", weight.stop, (ROWS, 1024))
    out = dense("out", "probe", x.stop, (ROWS, 1024))
    geometry = Geometry((1, 1, 1), 1)
    return Launch(linear_rows, geometry, (weight, x, n_rows, out), "probe"), out.stop
