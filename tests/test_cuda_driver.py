"""The CUDA device as far as no GPU is needed: arguments, targets, and why it cannot be opened."""

import ctypes
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from llamagraph.devices import list_devices, open_device
from llamagraph.devices.cpu import CpuDevice
from llamagraph.devices.cuda import (
    check_driver,
    check_package,
    check_tuning,
    driver_version,
    install_command,
)
from llamagraph.errors import DeviceError
from llamagraph.program.launch import In, Out, parameters
from llamagraph.program.target import target_named

driver = pytest.importorskip("llamagraph.devices.cuda.driver", exc_type=ImportError)
graphs = pytest.importorskip("llamagraph.devices.cuda.driver_graphs", exc_type=ImportError)
device = pytest.importorskip("llamagraph.devices.cuda.device", exc_type=ImportError)
memory = pytest.importorskip("llamagraph.devices.cuda.memory", exc_type=ImportError)

no_driver = pytest.mark.skipif(driver_version() is not None, reason="there is an NVIDIA driver")
H200 = driver.Gpu(0, "NVIDIA H200", (9, 0), 132, 232448, 150 << 30, True, True)


def kernel_like(x: In, n: int, out: Out, eps: float) -> None: ...


PARAMS = parameters(kernel_like)


def test_arguments_are_packed_in_the_kernels_order():
    store = device.pack(PARAMS, (0x7F00_0000_1234_5678, -3, 1 << 63, 1e-5))
    assert store.dtype == np.uint64 and store[0] == 0x7F00_0000_1234_5678 and store[2] == 1 << 63
    assert store[1:2].view(np.int32)[0] == -3
    assert store[3:4].view(np.float32)[0] == np.float32(1e-5)


def test_what_does_not_fit_an_argument_is_our_fault():
    with pytest.raises(OverflowError):
        device.pack(PARAMS, (0, 1 << 31, 0, 0.0))
    with pytest.raises(ValueError):
        device.pack(PARAMS, (0, 1))


def prepared(pdl: bool):
    asked: list[int] = []
    function = SimpleNamespace(name="k", handle=driver.cu.CUfunction(77),
                               allow_shared=asked.append)
    stream = SimpleNamespace(handle=driver.cu.CUstream(5))
    store = device.pack(PARAMS, (100, 7, 300, 0.5))
    return graphs.Prepared(function, stream, (3, 4, 5), 96, 50_000, pdl, store), asked


@pytest.mark.parametrize("pdl", [False, True])
def test_a_launch_is_made_ready_once(pdl):
    bound, asked = prepared(pdl)
    c = bound.config
    assert (c.gridDimX, c.gridDimY, c.gridDimZ, c.blockDimX, c.blockDimY) == (3, 4, 5, 96, 1)
    assert c.sharedMemBytes == 50_000 and asked == [50_000] and int(c.hStream) == 5
    assert c.numAttrs == int(pdl)
    if pdl:
        assert c.attrs[0].id == graphs.PDL
        assert c.attrs[0].value.programmaticStreamSerializationAllowed == 1


def test_a_launch_can_ask_l2_to_keep_bytes():
    function = SimpleNamespace(name="k", handle=driver.cu.CUfunction(77), allow_shared=print)
    stream = SimpleNamespace(handle=driver.cu.CUstream(5))
    store = device.pack(PARAMS, (100, 7, 300, 0.5))
    bound = graphs.Prepared(function, stream, (1, 1, 1), 32, 0, True, store, (4096, 512, 0.25))
    pdl, window = bound.config.attrs
    assert bound.config.numAttrs == 2 and pdl.id == graphs.PDL and window.id == graphs.WINDOW
    asked = window.value.accessPolicyWindow
    assert (int(asked.base_ptr), asked.num_bytes, asked.hitRatio) == (4096, 512, 0.25)
    assert asked.hitProp.name.endswith("PERSISTING") and asked.missProp.name.endswith("STREAMING")
    assert bound.call is driver.cu.cuLaunchKernelEx
    assert bound.args == (bound.config, bound.function, bound.params, 0)


def test_a_copy_is_made_ready_for_a_stream_and_for_a_graph():
    stream = SimpleNamespace(handle=driver.cu.CUstream(5))
    bound = graphs.PreparedCopy(1 << 40, 1 << 41, 77, stream)
    assert bound.call is driver.cu.cuMemcpyAsync
    assert bound.args == (1 << 41, 1 << 40, 77, stream.handle) and not bound.pdl
    node = bound._node
    assert (int(node.srcDevice), int(node.dstDevice)) == (1 << 40, 1 << 41)
    assert (node.WidthInBytes, node.Height, node.Depth) == (77, 1, 1)
    assert node.srcMemoryType == node.dstMemoryType == driver.cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED


def test_the_pointers_lead_to_the_arguments():
    bound, _ = prepared(True)
    addresses = (ctypes.c_uint64 * 4).from_address(bound.params)
    assert ctypes.c_uint64.from_address(addresses[0]).value == 100
    assert ctypes.c_int32.from_address(addresses[1]).value == 7
    assert ctypes.c_float.from_address(addresses[3]).value == 0.5


def test_a_node_launches_the_same():
    bound, _ = prepared(True)
    node = bound.node
    assert node is bound.node and int(node.func) == 77 and node.kernelParams == bound.params
    assert (node.gridDimX, node.gridDimZ, node.blockDimX, node.sharedMemBytes) == (3, 5, 96, 50_000)


def test_only_pages_without_memory_are_asked_for():
    mapped = bytearray(b"\0\1\1\0\0\1\0")
    assert memory.unmapped(mapped, 0, 7) == [(0, 1), (3, 5), (6, 7)]
    assert memory.unmapped(mapped, 4, 6) == [(4, 5)]
    assert memory.unmapped(mapped, 1, 3) == memory.unmapped(mapped, 2, 2) == []


def test_a_call_that_the_driver_lacks_is_named():
    def cuNew():
        raise RuntimeError('Function "cuNew" not found')

    with pytest.raises(DeviceError, match="adding: this driver has no cuNew; update it"):
        driver.call(cuNew, doing="adding")


def test_calls_give_what_they_return():
    assert driver.call(lambda: (0,), doing="") == ()
    assert driver.call(lambda: (0, 4), doing="") == 4
    assert driver.call(lambda a: (0, a, 5), 3, doing="") == (3, 5)


def test_the_target_has_the_real_gpus_counts():
    target = device.target_of(H200)
    assert target == target_named("sm_90a").with_sm(132, 232448) and target.pdl
    other = driver.Gpu(0, "GB300", (10, 3), 160, 232448, 1, True, True)
    assert device.target_of(other).name == "sm_103" and device.target_of(other).pdl
    assert not device.target_of(driver.Gpu(0, "L40", (8, 7), 142, 101376, 1, True, True)).pdl


def test_another_targets_choices_keep_the_real_gpus_counts():
    target = device.target_of(H200, target_named("sm_80"))
    assert target == target_named("sm_80").with_sm(132, 232448) and not target.pdl
    check_tuning(target_named("sm_80"), "sm_90a")
    check_tuning(target_named("sm_90a"), "sm_90a")
    for name, arch in (("sm_120", "sm_90a"), ("sm_90a", "sm_86"), ("sm_90a", "sm_120"),
                       ("numpy", "sm_90a")):
        with pytest.raises(DeviceError, match=f"--arch-tuning {name}: {arch} may not"):
            check_tuning(target_named(name), arch)


def test_a_loop_is_refused_in_a_line():
    assert device.no_loop(H200, (12, 4)) == device.no_loop(H200, (13, 0)) == ""
    assert "12.4 or later, this one is for 12.3" in device.no_loop(H200, (12, 3))
    assert "display" in device.no_loop(replace(H200, watchdog=True), (13, 0))


@pytest.mark.parametrize("version, words", [
    (None, "no NVIDIA driver"),
    ((11, 8), "too old: it supports CUDA 11.8, 12.0 is needed"),
])
def test_a_driver_that_cannot_be_used_is_named(version, words):
    with pytest.raises(DeviceError, match=words) as caught:
        check_driver(version)
    assert "\n" not in str(caught.value)


def test_the_command_fits_the_driver():
    assert install_command((12, 4)) == "pip install 'llamagraph[cu12]'"
    assert install_command((13, 0)) == "pip install 'llamagraph[cu13]'"
    check_package("NVRTC", (12, 9), (13, 0))
    with pytest.raises(DeviceError, match=r"NVRTC 13.0 needs a later.*12.4.*\[cu12\]"):
        check_package("NVRTC", (13, 0), (12, 4))


def test_a_library_that_is_no_driver_is_none():
    assert driver_version("libnothing.so.77") is None
    assert driver_version("libc.so.6") is None


@no_driver
def test_auto_says_in_one_line_why_the_cpu_runs():
    lines: list[str] = []
    opened = open_device("auto", warn=lines.append)
    assert isinstance(opened, CpuDevice) and len(lines) == 1
    assert lines[0].endswith("using the CPU") and len(lines[0]) < 80
    with pytest.raises(DeviceError, match="no GPU"):
        open_device("cuda", warn=lines.append)
    assert list_devices()[0] == "cpu"


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cpu:0", "cuda:", "auto:1"])
def test_an_unknown_device_is_refused(name):
    with pytest.raises(DeviceError, match="there are auto, cpu, cuda and cuda:N"):
        open_device(name, warn=print)


def test_the_cpu_needs_no_cuda():
    code = (
        "import sys\nfrom llamagraph.devices import open_device\n"
        "open_device('cpu', warn=print)\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'cuda']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
