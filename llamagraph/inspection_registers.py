"""What a step's kernels take of a multiprocessor, from compiling them; needs NVRTC, no GPU.

Knows the plan and the compiler.
"""

from concurrent.futures import ThreadPoolExecutor

from llamagraph.errors import DeviceError
from llamagraph.inspection import Setting, planned
from llamagraph.planner import Planner
from llamagraph.program.launch import Kernel


def registers(planner: Planner, setting: Setting) -> dict[Kernel, int]:
    """Registers a thread of each kernel of the step; a copy has none."""
    from llamagraph.devices.cuda import compiler

    arch = planner.target.name
    if not planner.target.is_cuda or compiler.nvrtc_version() is None:
        raise DeviceError(f"registers of {arch}: a GPU's target and NVRTC are needed "
                          f"(pip install 'llamagraph[cu13]')")
    kernels = {launch.kernel for launch in planned(planner, setting).launches}
    units = {k: compiler.Unit(k.source, k.constants) for k in kernels if k.source}
    folder = compiler.source_folder()

    def compiled(unit: compiler.Unit) -> dict[str, compiler.Resources]:
        return compiler.resources(compiler.compile_unit(unit, arch, folder, verbose=True)[1])

    with ThreadPoolExecutor() as pool:
        distinct = list(dict.fromkeys(units.values()))
        found = dict(zip(distinct, pool.map(compiled, distinct), strict=True))
    return {kernel: found[unit][kernel.name].registers for kernel, unit in units.items()}
