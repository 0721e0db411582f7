"""The CUDA driver API: checked calls, and the objects that the driver hands out.

GPUs, contexts, streams, events and kernels; graphs are in driver_graphs.py, memory in
driver_memory.py. With compiler.py these are all that imports `cuda.bindings`; where the bindings
12.9 and 13 differ, `newest` picks the form that both have. Knows no launch list, no arena and no
model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.bindings
from cuda.bindings import driver as cu

from llamagraph.errors import DeviceError, MemoryLimitError

OUT_OF_MEMORY = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY


def bindings_version() -> tuple[int, int]:
    """Of the installed cuda-bindings: the CUDA version that they speak."""
    major, minor = cuda.bindings.__version__.split(".")[:2]
    return int(major), int(minor)


def failure(name: str, code: Any, doing: str) -> DeviceError | MemoryLimitError:
    """The error for a call that returned `code`; being out of memory is a kind of its own."""
    text = cu.cuGetErrorString(code)[1]
    message = f"{doing}: {name}: {text.decode() if text else code} ({code.name})"
    return MemoryLimitError(message) if code == OUT_OF_MEMORY else DeviceError(message)


def call(function: Callable[..., tuple], *args: Any, doing: str) -> Any:
    """What a driver call returns beside its code.

    DeviceError holds the call's name, CUDA's own text and what was being done.
    """
    name = function.__name__
    try:
        code, *values = function(*args)
    except RuntimeError as error:  # the bindings' way to say that the driver lacks it
        raise DeviceError(f"{doing}: this driver has no {name}; update it ({error})") from error
    if code:
        raise failure(name, code, doing)
    return values[0] if len(values) == 1 else tuple(values)


def newest(name: str) -> Callable[..., tuple]:
    """The form of a call that knows edge data: 12.9 numbers it, 13 gave it the plain name."""
    return next(f for end in ("_v3", "_v2", "") if (f := getattr(cu, name + end, None)))


# --- the GPU -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """Facts about a GPU; sizes in bytes. `vmm`: ranges may be reserved and mapped by pages.

    `l2_persist` is what of the L2 cache may be set aside, `l2_window` the longest range that a
    launch may ask it to keep. `watchdog`: a display depends on it, and kernels that run for seconds
    are ended.
    """

    ordinal: int
    name: str
    capability: tuple[int, int]
    n_sm: int
    shared_per_block: int
    n_bytes: int
    vmm: bool
    pools: bool
    l2_persist: int = 0
    l2_window: int = 0
    watchdog: bool = False

    @property
    def arch(self) -> str:
        """The architecture to compile for; Hopper's own instructions want the `a`."""
        major, minor = self.capability
        return "sm_90a" if self.capability == (9, 0) else f"sm_{major}{minor}"


def gpus() -> list[Gpu]:
    """Every GPU that the driver shows; DeviceError where it shows none."""
    call(cu.cuInit, 0, doing="looking for a GPU")
    return [_gpu(i) for i in range(call(cu.cuDeviceGetCount, doing="counting GPUs"))]


def _gpu(ordinal: int) -> Gpu:
    doing = f"asking about GPU {ordinal}"
    device = call(cu.cuDeviceGet, ordinal, doing=doing)

    def fact(name: str) -> int:
        attribute = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return call(cu.cuDeviceGetAttribute, attribute, device, doing=doing)

    return Gpu(
        ordinal,
        call(cu.cuDeviceGetName, 256, device, doing=doing).split(b"\0")[0].decode(),
        (fact("COMPUTE_CAPABILITY_MAJOR"), fact("COMPUTE_CAPABILITY_MINOR")),
        fact("MULTIPROCESSOR_COUNT"),
        fact("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        call(cu.cuDeviceTotalMem, device, doing=doing),
        bool(fact("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")),
        bool(fact("MEMORY_POOLS_SUPPORTED")),
        fact("MAX_PERSISTING_L2_CACHE_SIZE"),
        fact("MAX_ACCESS_POLICY_WINDOW_SIZE"),
        bool(fact("KERNEL_EXEC_TIMEOUT")),
    )


class Context:
    """A GPU's primary context, current in the thread that opened it until it is closed."""

    def __init__(self, gpu: Gpu):
        doing = f"opening {gpu.name}"
        self._device = call(cu.cuDeviceGet, gpu.ordinal, doing=doing)
        self._before = call(cu.cuCtxGetCurrent, doing=doing)
        self._handle = call(cu.cuDevicePrimaryCtxRetain, self._device, doing=doing)
        self.enter()

    def enter(self) -> None:
        """Makes it current in the calling thread."""
        call(cu.cuCtxSetCurrent, self._handle, doing="entering the GPU's context")

    def close(self) -> None:
        cu.cuCtxSetCurrent(self._before)
        call(cu.cuDevicePrimaryCtxRelease, self._device, doing="leaving the GPU")


class SetAside:
    """L2 cache for what launches ask it to keep, of the current context until it is closed.

    It is taken from all others, so only once `open` has been called.
    """

    def __init__(self, n_bytes: int):
        self.n_bytes, self._before = n_bytes, None
        self._limit = cu.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE

    def open(self) -> None:
        if self._before is None:
            doing = f"setting aside {self.n_bytes} bytes of L2"
            self._before = call(cu.cuCtxGetLimit, self._limit, doing=doing)
            call(cu.cuCtxSetLimit, self._limit, self.n_bytes, doing=doing)

    def close(self) -> None:
        if self._before is not None:
            call(cu.cuCtxResetPersistingL2Cache, doing="freeing set aside L2")
            call(cu.cuCtxSetLimit, self._limit, self._before, doing="giving back set aside L2")


# --- streams, events, kernels ------------------------------------------------------------------


class Stream:
    """An ordered queue of the GPU, or the recording of one."""

    def __init__(self) -> None:
        flags = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.handle = call(cu.cuStreamCreate, flags, doing="making a stream")

    def wait(self) -> None:
        call(cu.cuStreamSynchronize, self.handle, doing="waiting for queued work")

    def begin_capture(self) -> None:
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(cu.cuStreamBeginCapture, self.handle, mode, doing="beginning a capture")

    def end_capture(self) -> Any:
        """The graph that was recorded."""
        return call(cu.cuStreamEndCapture, self.handle, doing="ending a capture")

    def abandon_capture(self) -> None:
        """Ends a capture that has failed; its graph, if there is one, goes."""
        code, graph = cu.cuStreamEndCapture(self.handle)
        if not code and int(graph):
            cu.cuGraphDestroy(graph)

    def last_node(self) -> Any:
        """The node of what was captured last, on which the next one will depend."""
        info = call(newest("cuStreamGetCaptureInfo"), self.handle, doing="mapping a capture")
        nodes = info[3]
        if not nodes:
            raise DeviceError("mapping a capture: the stream's launch made no graph node")
        return nodes[-1]

    def close(self) -> None:
        call(cu.cuStreamDestroy, self.handle, doing="closing a stream")


class Event:
    """A moment in a stream."""

    def __init__(self, timed: bool = True) -> None:
        flags = cu.CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timed else flags.CU_EVENT_DISABLE_TIMING
        self._handle = call(cu.cuEventCreate, int(flag), doing="making an event")

    def record(self, stream: Stream) -> None:
        call(cu.cuEventRecord, self._handle, stream.handle, doing="recording an event")

    def wait(self) -> None:
        call(cu.cuEventSynchronize, self._handle, doing="waiting for an event")

    def seconds_since(self, earlier: "Event") -> float:
        self.wait()
        return 1e-3 * call(
            cu.cuEventElapsedTime, earlier._handle, self._handle, doing="timing queued work"
        )

    def close(self) -> None:
        call(cu.cuEventDestroy, self._handle, doing="closing an event")


class Function:
    """A kernel of a loaded module. `shared` bytes are static, `registers` are a thread's."""

    def __init__(self, module: Any, name: str, where: str):
        self.name = name
        self._doing = f"loading {name} of {where}"
        self.handle = call(cu.cuModuleGetFunction, module, name.encode(), doing=self._doing)
        self.shared = self._fact("SHARED_SIZE_BYTES")  # asking loads it: a capture must not
        self.registers = self._fact("NUM_REGS")
        self._dynamic = 48 << 10  # what every kernel may have

    def _fact(self, name: str) -> int:
        attribute = getattr(cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return call(cu.cuFuncGetAttribute, attribute, self.handle, doing=self._doing)

    def allow_shared(self, n_bytes: int) -> None:
        """Lets launches have so much dynamic shared memory."""
        if n_bytes + self.shared > self._dynamic:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(cu.cuFuncSetAttribute, self.handle, attribute, n_bytes,
                 doing=f"{self.name} wants {n_bytes} bytes of shared memory")
            self._dynamic = n_bytes + self.shared


def load_module(cubin: bytes, where: str) -> Any:
    return call(cu.cuModuleLoadData, cubin, doing=f"loading the kernels of {where}")


def unload_module(module: Any) -> None:
    call(cu.cuModuleUnload, module, doing="unloading kernels")
