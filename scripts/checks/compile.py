"""Compiles the kernel instances, without a GPU, and says what each takes.

    scripts/check-kernels [--all] [--out DIR] [--models DIR] [-k WORD] [-q] [ARCH...]

Every instance of most kernels; of those with very many a few that stand for the others
(`checks/cover.py`), or with --all, -k or --out all of them.

Fails on a spill, on more shared memory than the architecture has, on products of warp groups that
the compiler lets wait for each other (C75..), and on what does not compile.
DIR then holds the CUBINs as the program's own cache does: copied to the folder `kernels` of the
cache ($LLAMAGRAPH_CACHE) of a machine with a GPU, they are used there without NVRTC.
"""

import argparse
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from checks.cover import representative
from checks.instances import instances
from llamagraph.devices.cuda.compiler import (
    Compiler,
    Resources,
    Unit,
    compile_unit,
    resources,
    source_folder,
    write_cubin,
)
from llamagraph.errors import LlamaGraphError
from llamagraph.program.launch import Kernel
from llamagraph.program.target import TARGETS


class Compiled(NamedTuple):
    """What came of a unit on an architecture: its entries' resources, or an error."""

    found: dict[str, Resources]
    error: str = ""
    serialised: str = ""  # the entries whose products of warp groups are, in the compiler's words


def compile_one(unit: Unit, arch: str, out: Path | None) -> Compiled:
    try:
        cubin, log = compile_unit(unit, arch, source_folder(), verbose=True)
    except (LlamaGraphError, OSError) as error:
        return Compiled({}, str(error))
    if out is not None:
        write_cubin(Compiler(arch, out).path(unit), cubin)
    return Compiled(resources(log), serialised="; ".join(re.findall(r"\(C75.*", log)))


def unit_of(kernel: Kernel) -> Unit:
    return Unit(kernel.source, kernel.constants)


def faults(found: Resources | None, dynamic: int, limit: int, serialised: str) -> list[str]:
    """What is wrong with an instance."""
    if serialised:
        return [serialised]
    if found is None:
        return ["there is no such entry with these constants"]
    wrong = []
    if found.spill_stores or found.spill_loads:
        wrong.append(f"spills {found.spill_stores} + {found.spill_loads} bytes")
    if found.shared + dynamic > limit:
        wrong.append(f"{found.shared} + {dynamic} bytes of shared memory, {limit} are there")
    return wrong


def judge(arch: str, wanted: dict[Kernel, int], done: dict[Unit, Compiled], quiet: bool) -> int:
    """Prints a line an instance; how many are bad."""
    bad = 0
    for kernel, dynamic in sorted(wanted.items(), key=lambda item: str(item[0])):
        compiled = done[unit_of(kernel)]
        r = compiled.found.get(kernel.name)
        wrong = [] if compiled.error else faults(
            r, dynamic, TARGETS[arch].shared_per_block, compiled.serialised)
        bad += bool(wrong or compiled.error)
        if r and (wrong or not quiet):
            print(f"{'BAD' if wrong else 'ok '} {arch} {kernel.name} {unit_of(kernel)}: "
                  f"{r.registers} registers, {r.shared}+{dynamic} shared, {r.stack} stack")
        for fault in wrong:
            print(f"BAD {arch} {kernel.name} {unit_of(kernel)}: {fault}")
    for unit, compiled in done.items():
        if compiled.error:
            print(f"BAD {arch} {unit}: {compiled.error}")
    return bad


def check(arch: str, files: list[Path], out: Path | None, word: str, quiet: bool, few: bool
          ) -> int:
    """Compiles an architecture's instances, or a few for all; how many are bad."""
    started = time.perf_counter()
    found = instances(TARGETS[arch], files)
    chosen = representative(found) if few else found
    wanted = {kernel: dynamic for kernel, dynamic in found.items()
              if kernel in chosen and word in f"{kernel.name} {unit_of(kernel)}"}
    units = list(dict.fromkeys(unit_of(kernel) for kernel in wanted))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        n = len(units)
        done = dict(zip(units, pool.map(compile_one, units, [arch] * n, [out] * n), strict=True))
    bad = judge(arch, wanted, done, quiet)
    print(f"{arch}: {len(wanted)} of {len(found)} instances from {len(units)} units, {bad} bad, "
          f"{time.perf_counter() - started:.0f} s", flush=True)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arch", nargs="*", metavar="ARCH",
                        help=f"default: {' '.join(n for n in TARGETS if n.startswith('sm_'))}")
    parser.add_argument("--all", action="store_true", help="also those that others stand for")
    parser.add_argument("--out", type=Path, help="folder for the CUBINs")
    parser.add_argument("--models", type=Path, help="folder of GGUF files to plan as well")
    parser.add_argument("-k", default="", metavar="WORD", help="only instances with it in the name")
    parser.add_argument("-q", "--quiet", action="store_true", help="only what is bad")
    options = parser.parse_args()
    files = sorted(options.models.glob("*.gguf")) if options.models else []
    archs = options.arch or [n for n, target in TARGETS.items() if target.is_cuda]
    if unknown := [a for a in archs if a not in TARGETS or not TARGETS[a].is_cuda]:
        parser.error(f"unknown architecture {unknown[0]}")
    few = not (options.all or options.k or options.out)
    bad = [check(arch, files, options.out, options.k, options.quiet, few) for arch in archs]
    return 1 if any(bad) else 0
