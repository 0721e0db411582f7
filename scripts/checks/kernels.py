"""Every kernel's examples on the GPU against their numpy references.

Outputs are poisoned first, so what the reference leaves alone must still be poison; everything that
is no output, and the gaps between the buffers, must not change by a bit. Each example runs twice,
plain and with early starts, and must give the same bits.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from checks.examples import Example, examples, raw_bytes
from checks.report import Report
from llamagraph.devices import open_device
from llamagraph.devices.cuda.device import CudaDevice
from llamagraph.errors import LlamaGraphError
from llamagraph.kernels import all_kernels
from llamagraph.kernels.examples import RawWeight, numpy_args
from llamagraph.kernels.kv import Cache
from llamagraph.kernels.repack import Tiler
from llamagraph.program.launch import Buffer, Kernel

LIMIT = 1e-4  # of the normalised error
HALF_LIMIT = 1e-3  # of outputs in half precision, and of products of what is rounded to it
ROUNDED = ("hopper", "warps", "rope_attention_few")  # kernels with such products
POISON = 0xFF  # a NaN in every float type
PRIVATE = {"partials"}  # room that a kernel uses as it likes
BLOCKS = (1, 3, 8)  # values for a grid's variable: no bit may depend on it


def bring_in(device: CudaDevice, example: Example) -> None:
    """Writes the arguments to the GPU, over poison everywhere else."""
    memory = device.memory
    memory.fill(Buffer("all", "scratch", 0, example.n_bytes, "U8", (example.n_bytes,)), POISON)
    for param, buffer, arg in example.buffers():
        if isinstance(arg, RawWeight):
            memory.upload(buffer, arg.raw, Tiler(device.target))
        elif param.role.reads:
            memory.write(raw_bytes(buffer), np.ascontiguousarray(arg).reshape(-1).view(np.uint8))


def all_bytes(device: CudaDevice, example: Example) -> np.ndarray:
    n = example.n_bytes
    return device.memory.read(Buffer("all", "scratch", 0, n, "U8", (n,)))


def run_once(device: CudaDevice, example: Example, n_blocks: int, pdl: bool
             ) -> tuple[np.ndarray, np.ndarray]:
    """All bytes before and after the launch."""
    device.memory.grow("scratch", 0, example.n_bytes)
    bring_in(device, example)
    before = all_bytes(device, example)
    launch = example.launch(device.target, pdl)
    call = launch.resolve(dict.fromkeys(launch.vars(), n_blocks), device.memory.address)
    device.queue.launch(device.queue.bind(call))
    device.queue.wait()
    return before, all_bytes(device, example)


def reference(example: Example) -> list[Any]:
    """The arguments as the reference leaves them."""
    args: list[Any] = []
    for param, arg in zip(example.kernel.params, numpy_args(example.args), strict=True):
        if param.role and param.role.writes:
            arg = arg.copy()
            if not param.role.reads:
                arg.reshape(-1).view(np.uint8)[:] = POISON
        args.append(arg)
    with np.errstate(all="ignore"):
        example.kernel.reference(*args, **dict(example.kernel.constants))
    return args


def wrong_bytes(example: Example, before: np.ndarray, after: np.ndarray) -> str:
    """Which bytes have changed that must not."""
    allowed = np.zeros(len(before), bool)
    for param, buffer, _ in example.buffers():
        if param.role.writes:
            allowed[buffer.start : buffer.stop] = True
    changed = np.flatnonzero((before != after) & ~allowed)
    if not len(changed):
        return ""
    inside = [p.name for p, b, _ in example.buffers() if b.start <= changed[0] < b.stop]
    return f"{len(changed)} bytes written in {inside or 'a gap'}"


def numbers(kernel: Kernel, name: str, array: np.ndarray) -> np.ndarray:
    """A KV cache as floats: its bits may differ where a rotation is rounded otherwise."""
    constants: dict[str, Any] = dict(kernel.constants)
    dtype = constants.get({"cache_k": "TYPE_K", "cache_v": "TYPE_V"}.get(name, ""))
    if dtype is None:
        return array
    return Cache(array, dtype, constants["N_HEAD_KV"], constants["HEAD_DIM"]).read(slice(None))


def difference(found: np.ndarray, expected: np.ndarray) -> tuple[float, str]:
    """The normalised error, and what is wrong beside it."""
    if expected.dtype.kind != "f":
        bad = int((found != expected).sum())
        return 0.0, f"{bad} of {expected.size} numbers differ" if bad else ""
    untouched = np.isnan(expected)
    if not np.isnan(found[untouched]).all():
        return 0.0, f"{int((~np.isnan(found[untouched])).sum())} numbers written beyond the rows"
    a, b = (x[~untouched].astype(np.float64) for x in (found, expected))
    if not np.isfinite(a).all():
        return np.inf, f"{int((~np.isfinite(a)).sum())} of {a.size} numbers are not finite"
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30), ""


def compare(example: Example, after: np.ndarray, expected: Sequence[Any]) -> tuple[float, str]:
    """The worst error of the outputs, and what else is wrong with them."""
    worst, faults = 0.0, []
    by_name = {p.name: value for p, value in zip(example.kernel.params, expected, strict=True)}
    for param, buffer, _ in example.buffers():
        if not param.role.writes or param.name in PRIVATE:
            continue
        wanted = by_name[param.name]
        found = after[buffer.start : buffer.stop].view(wanted.dtype).reshape(wanted.shape)
        bad, fault = difference(*(numbers(example.kernel, param.name, x) for x in (found, wanted)))
        halves = wanted.dtype != np.float32 or example.kernel.name.startswith(ROUNDED)
        limit = HALF_LIMIT if halves else LIMIT
        if fault or not bad <= limit:
            faults.append(f"{param.name}: {fault or f'{bad:.1e}'}")
        worst = max(worst, bad)
    return worst, "; ".join(faults)


def private(example: Example, after: np.ndarray) -> np.ndarray:
    """The bytes without those that the kernel uses as it likes."""
    kept = after.copy()
    for param, buffer, _ in example.buffers():
        if param.name in PRIVATE:
            kept[buffer.start : buffer.stop] = 0
    return kept


def check_example(device: CudaDevice, example: Example) -> tuple[float, str]:
    """The worst error; and what is wrong, empty where all is well."""
    expected = reference(example)
    launch = example.launch(device.target)
    runs = [(n, pdl) for n in (BLOCKS if launch.vars() else (1,))
            for pdl in ((False, True) if device.target.pdl else (False, False))]
    first, worst, faults = None, 0.0, []
    for n_blocks, pdl in runs:
        before, after = run_once(device, example, n_blocks, pdl)
        bad, fault = compare(example, after, expected)
        fault = fault or wrong_bytes(example, before, after)
        worst, kept = max(worst, bad), private(example, after)
        if fault:
            faults.append(fault)
        elif first is not None and not np.array_equal(first, kept):
            faults.append(f"other bits with {n_blocks} blocks, PDL {pdl}")
        first = kept if first is None else first
    return worst, faults[0] if faults else ""


def title(kernel: Kernel, number: int) -> str:
    constants = " ".join(f"{name}={value}" for name, value in kernel.constants)
    return f"{kernel.name}[{number}] {constants}".rstrip()


def check_kernel(device: CudaDevice, report: Report, name: str, found: list[Example]) -> None:
    """A row for the kernel, and one for each example with a fault."""
    errors = []
    for i, example in enumerate(found):
        with report.check("kernels", title(example.kernel, i), timed=False):
            error, fault = check_example(device, example)
            errors.append(error)
            if fault:
                report.add("kernels", title(example.kernel, i), False, fault)
    worst = max(errors, default=0.0)
    report.add("kernels", name, found, f"{len(found)} examples, worst {worst:.1e}")


def load(device: CudaDevice, report: Report, found: list[Example]) -> None:
    """Compiles side by side; a source that does not compile is seen again where it is used."""
    started, compiler = time.perf_counter(), device.kernels.compiler
    with suppress(LlamaGraphError):
        device.queue.load([e.kernel for e in found])
    report.add("kernels", "compiled", True,
               f"{compiler.n_compiled} units in {time.perf_counter() - started:.1f} s")


def run(report: Report, word: str = "") -> None:
    """All examples of all kernels with `word` in the name."""
    device = open_device("cuda", warn=print)
    assert isinstance(device, CudaDevice)
    device.memory.reserve("scratch", 1 << 32)
    found = {n: list(examples(k)) for n, k in sorted(all_kernels().items())
             if word in n and k.source  # numpy's own products have none
             and k.arch in ("", device.target.name)}
    every = [e for list_ in found.values() for e in list_]
    # At once: memcheck takes a copy that goes over the end of what was mapped for an invalid one,
    # whatever was mapped behind it.
    device.memory.grow("scratch", 0, max((e.n_bytes for e in every), default=0))
    load(device, report, every)
    for name, list_ in found.items():
        check_kernel(device, report, name, list_)
    device.close()
