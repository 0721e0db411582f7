"""NVRTC and its cache, on a folder of tiny sources; no GPU is needed."""

import pytest

from llamagraph.errors import DeviceError

compiler = pytest.importorskip("llamagraph.devices.cuda.compiler", exc_type=ImportError)
Compiler, Resources, Unit = compiler.Compiler, compiler.Resources, compiler.Unit
if compiler.nvrtc_version() is None:
    pytest.skip("NVRTC is not installed", allow_module_level=True)

SCALE = """
#include <cuda_fp16.h>
#include "factor.cuh"
#ifdef N
extern "C" __global__ void scale(float* x) {
    __shared__ float s[N];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = __half2float(__float2half(s[N - 1 - threadIdx.x])) * FACTOR;
}
#endif
extern "C" __global__ void plain(float* x) { x[0] = FACTOR; }
"""
UNIT = Unit("scale.cu", (("N", 64),))


class WithoutNvrtc(Compiler):
    version = None


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "scale.cu").write_text(SCALE)
    (folder / "factor.cuh").write_text("#pragma once\n#define FACTOR 2.0f\n")
    return folder


def compiler_for(sources, arch="sm_90a", kind=Compiler):
    return kind(arch, sources.parent / "cache", sources, "pip install it")


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_a_cubin_is_made_once(sources, arch):
    first, second = compiler_for(sources, arch), compiler_for(sources, arch)
    cubin = first.cubin(UNIT)
    assert cubin.startswith(b"\x7fELF") and first.n_compiled == 1
    assert second.cubin(UNIT) == cubin and second.n_compiled == 0


def test_what_a_cubin_is_made_from_is_its_key(sources):
    c = compiler_for(sources)
    keys = {c.key(UNIT), c.key(Unit("scale.cu")), c.key(Unit("scale.cu", (("N", 65),))),
            compiler_for(sources, "sm_80").key(UNIT)}
    for name in ("factor.cuh", "new.cuh", "scale.cu"):
        with (sources / name).open("a") as file:
            file.write("// changed\n")
        keys.add(compiler_for(sources).key(UNIT))
    assert len(keys) == 7
    assert compiler_for(sources).key(UNIT) in keys


def test_a_damaged_entry_is_made_again(sources):
    c = compiler_for(sources)
    cubin, path = c.cubin(UNIT), c.path(UNIT)
    data = path.read_bytes()
    for damage in (b"", data[:-1], data[:200] + b"?" + data[201:]):
        path.write_bytes(damage)
        assert compiler.read_cubin(path) is None
        again = compiler_for(sources)
        assert again.cubin(UNIT) == cubin and again.n_compiled == 1
        assert path.read_bytes() == data
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_units_are_compiled_side_by_side(sources):
    c = compiler_for(sources)
    units = [Unit("scale.cu", (("N", n),)) for n in (32, 64, 96)]
    made = c.cubins(units)
    assert list(made) == units and len(set(made.values())) == 3 and c.n_compiled == 3


def test_a_cache_that_cannot_be_written_is_only_read(sources):
    (sources.parent / "cache").write_text("no folder")
    c = compiler_for(sources)
    assert c.cubin(UNIT) == c.cubin(UNIT)
    assert c.n_compiled == 2 and (sources.parent / "cache").read_text() == "no folder"


def test_without_nvrtc_the_cache_is_enough(sources):
    without = compiler_for(sources, kind=WithoutNvrtc)
    assert not without.usable()
    with pytest.raises(DeviceError, match=r"^scale.cu N=64 must be compiled.*pip install it$"):
        without.cubin(UNIT)
    cubin = compiler_for(sources).cubin(UNIT)
    assert without.usable() and without.cubin(UNIT) == cubin


def test_an_error_shows_the_compilers_log(sources):
    (sources / "factor.cuh").write_text("#define FACTOR nonsense\n")
    with pytest.raises(DeviceError, match=r"scale.cu N=64 does not compile for sm_90a") as caught:
        compiler_for(sources).cubin(UNIT)
    assert 'identifier "nonsense" is undefined' in str(caught.value)


def test_the_log_tells_what_a_kernel_takes(sources):
    _, log = compiler.compile_unit(UNIT, "sm_80", sources, verbose=True)
    found = compiler.resources(log)
    assert set(found) == {"scale", "plain"}
    assert found["scale"].shared == 256 and 0 < found["scale"].registers < 32
    assert found["scale"].spill_stores == found["scale"].spill_loads == 0


def test_spills_are_read():
    log = """
ptxas info    : Compiling entry function 'heavy' for 'sm_80'
ptxas info    : Function properties for heavy
    696 bytes stack frame, 1404 bytes spill stores, 1400 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 696 bytes cumulative stack size, 128 bytes smem
"""
    assert compiler.resources(log) == {"heavy": Resources(64, 128, 696, 1404, 1400)}


def test_the_projects_sources_are_found():
    assert list(compiler.source_folder().glob("*.cu"))
