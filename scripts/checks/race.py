"""Whether every kernel waits for the one before it, and whether this check would see it if not.

A step's kernels start before their predecessors have finished (programmatic dependent launch) and
wait inside. The same tokens are generated, or read as prompts, again and again: all that they leave
behind must be what plain launches, which start one after the other, have left. Then each kernel in
turn is compiled with its wait taken out, and the same comparison must fail; where the kernel before
it happens to be done in time, that one is delayed behind its own wait.
"""

import hashlib
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from checks.parity import random_tokens
from checks.report import Report
from checks.sources import copy_sources, open_altered
from llamagraph.devices.cuda import find_gpus
from llamagraph.devices.cuda.compiler import Unit
from llamagraph.devices.cuda.device import CudaDevice, target_of
from llamagraph.errors import DeviceError
from llamagraph.gguf.synthetic import SyntheticFile
from llamagraph.kernels.attention import LONG_KV
from llamagraph.planner import Planner, step_key
from llamagraph.program.launch import Buffer, Launch
from llamagraph.program.target import Target
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams

MODEL, N_CTX = "135m:q8_0", 10_000
N_TOKENS, REPEATS = 1000, 3
PARAMS = SamplingParams(temp=0.8, seed=1)
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
DELAY = 400_000  # cycles a token, shared among the kernels that are delayed


class Setting(NamedTuple):
    """How the tokens are generated, or read in prompts of so many rows. A graph's first kernel
    follows all of the graph before it, so only the stream can show that it waits."""

    mode: str = "capture"
    sampler: str = "greedy"
    depth: int = 16
    rows: int = 1
    model: str = MODEL


USUAL, CHAIN, LONG = Setting(), Setting(sampler="chain"), Setting(depth=LONG_KV + 100)
WIDE = Setting(model="1b:q4_k_m")  # where attention lets others start before it waits itself
FEW, MANY = Setting(rows=8), Setting(rows=64)
WITHOUT = (  # kernels that lose their wait, in a setting that has them
    ("embed_rows", Setting("stream")), ("gemv_norm_qkv", USUAL), ("rope_attention_decode", USUAL),
    ("gemv_add", USUAL), ("gemv_norm_gated", USUAL), ("gemv_norm", USUAL),
    ("choose_greedy", USUAL), ("choose_chain", CHAIN), ("rope_attention_split", LONG),
    ("attention_combine", LONG),
    *((name, WIDE) for name in ("gemv_norm_qkv", "rope_attention_decode", "gemv_add")),
    *((name, FEW) for name in (
        "rms_norm_panels", "warps_qkv", "rope_attention_few_panels", "warps_add", "warps_gated",
        "rms_norm_last", "gemv")),
    *((name, MANY) for name in (
        "hopper_qkv", "rope_store", "attention_wgmma_split", "attention_rows_combine_panels",
        "hopper_add", "hopper_gated")),
)


def late(n_launches: int) -> str:
    """A wait with a share of the delay behind it."""
    cycles = DELAY // n_launches
    return f"{WAIT} for (long long start = clock64(); clock64() - start < {cycles};) {{}}"


def open_runner(device: CudaDevice, setting: Setting) -> Runner:
    return Runner(SyntheticFile(setting.model), device, setting.mode, N_CTX)


def launches(target: Target, setting: Setting) -> tuple[Launch, ...]:
    """Of the first step."""
    key = step_key(setting.rows, setting.depth + setting.rows, "last", setting.sampler)
    return Planner(SyntheticFile(setting.model), target, N_CTX).plan(key).launches


def first_rows(buffer: Buffer, n: int) -> Buffer:
    n_bytes = buffer.n_bytes // buffer.shape[0] * n
    return replace(buffer, stop=buffer.start + n_bytes, shape=(n, *buffer.shape[1:]))


def left_behind(runner: Runner, setting: Setting) -> str:
    """A digest of the tokens, the KV cache and the last logits, N_TOKENS on."""
    runner.reset()
    PARAMS.write(runner.device.memory, runner.io)
    runner.prefill(random_tokens(runner, setting.depth), setting.sampler)
    for i in range(N_TOKENS // setting.rows):
        if setting.rows == 1:
            executor = runner.step(1, "last", setting.sampler)
        else:
            executor = runner.prefill(random_tokens(runner, setting.rows, i), setting.sampler)
    digest = hashlib.blake2b(runner.read_logits(executor).tobytes())
    for buffer in (runner.io["tokens"], *(b for kv in runner.kv.layers for b in (kv.k, kv.v))):
        digest.update(runner.device.memory.read(first_rows(buffer, runner.n_past)).tobytes())
    return digest.hexdigest()


def expected(setting: Setting) -> str:
    """What launches leave that start one after the other."""
    device = open_altered({})
    device.target = replace(device.target, pdl=False)
    with closing(open_runner(device, setting._replace(mode="stream"))) as runner:
        return left_behind(runner, setting)


def units(found: list[Launch]) -> list[Unit]:
    return [Unit(launch.kernel.source, launch.kernel.constants) for launch in found]


def differs(name: str, setting: Setting, wanted: str, folder: Path, delayed: bool) -> bool:
    """Whether something else is left where the kernel has lost its wait, and those before it are
    late, if that is asked for. `folder`: room for two copies of the sources."""
    chain = launches(target_of(find_gpus()[0]), setting)
    at = [i for i, launch in enumerate(chain) if launch.kernel.name == name]
    assert at, f"{setting} has no {name}"
    early = copy_sources(folder / "early", {"common.cuh": (WAIT, "")})
    others = {}
    if delayed:
        slow = copy_sources(folder / "late", {"common.cuh": (WAIT, late(len(at)))})
        others = dict.fromkeys(units([chain[i - 1] for i in at]), slow)
    others |= dict.fromkeys(units([chain[i] for i in at]), early)
    with closing(open_runner(open_altered(others), setting)) as runner:
        return any(left_behind(runner, setting) != wanted for _ in range(REPEATS))


def apart(work: Callable[..., bool], *args: Any) -> bool | str:
    """What the work returns in a process of its own, which a fault of the GPU ends, or the fault:
    a token that was chosen too early may have any number."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(work, *args).result()
        except DeviceError as error:
            return f"by {error}"


def check_repetition(setting: Setting, wanted: str, report: Report) -> None:
    with closing(open_runner(open_altered({}), setting)) as runner:
        found = [left_behind(runner, setting) for _ in range(REPEATS)]
    report.add("races", f"{N_TOKENS} tokens, {REPEATS} times, {' '.join(map(str, setting))}",
               set(found) == {wanted}, "as plain launches leave it")


def check_without(name: str, setting: Setting, wanted: str, report: Report) -> None:
    seen = ""
    for delayed, how in ((False, "at once"), (True, "with the kernel before it delayed")):
        with tempfile.TemporaryDirectory() as folder:
            if not seen:
                result = apart(differs, name, setting, wanted, Path(folder), delayed)
                seen = result if isinstance(result, str) else how if result else ""
    report.add("races", f"{name} without its wait", seen, f"caught {seen}" if seen else "not seen")


def run(report: Report) -> None:
    settings = list(dict.fromkeys(setting for _, setting in WITHOUT))
    wanted = {}
    for setting in settings:
        with report.check("races", f"repetition, {setting}"):
            wanted[setting] = expected(setting)
            check_repetition(setting, wanted[setting], report)
    for name, setting in WITHOUT:
        with report.check("races", name):
            check_without(name, setting, wanted[setting], report)
