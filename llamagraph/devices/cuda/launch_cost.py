"""What a launch costs the host, and how much of that is Python's. Knows the driver's one call."""

import time

from llamagraph.devices.cuda.driver import Stream
from llamagraph.devices.cuda.driver_graphs import Prepared

N_LAUNCHES, SAMPLES = 256, 20  # launches that the driver takes without waiting for the GPU


def launch_cost(prepared: Prepared, stream: Stream) -> tuple[float, float]:
    """Host seconds of one launch: the driver's own, and the bindings'.

    A loop of the bare call with everything prepared is timed twice: as it is, and with a grid of no
    blocks, which the driver refuses (CUDA_ERROR_INVALID_VALUE) before it does anything. The second
    is the loop, the bindings and the call; what the first takes longer is the driver's work, which
    a C program has as well.
    """
    whole = _seconds(prepared, stream)
    width, prepared.config.gridDimX = prepared.config.gridDimX, 0
    try:
        refused = _seconds(prepared, stream)
    finally:
        prepared.config.gridDimX = width
    return max(0.0, whole - refused), refused


def _seconds(prepared: Prepared, stream: Stream) -> float:
    """Of one call, the least of the samples; each begins with nothing queued."""
    samples = []
    for _ in range(SAMPLES):
        stream.wait()
        start = time.perf_counter()
        for _ in range(N_LAUNCHES):
            prepared.call(*prepared.args)
        samples.append((time.perf_counter() - start) / N_LAUNCHES)
    stream.wait()
    return min(samples)
