"""What the GPU's checks are made of, as far as it needs no GPU."""

import inspect
import pathlib
import sys
from importlib import import_module

import pytest

pytest.importorskip("llamagraph.devices.cuda.compiler", exc_type=ImportError)
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "scripts"))
from checks import counters, decode_table, gpu, graphs, race, sanitize, speed
from checks.gpu import PARTS
from checks.sources import copy_sources

from llamagraph.cli.report import timing_lines
from llamagraph.devices.cpu import CpuDevice
from llamagraph.devices.cuda.compiler import source_folder
from llamagraph.gguf.synthetic import SyntheticFile
from llamagraph.inspection import Setting
from llamagraph.inspection import inspect as inspected
from llamagraph.inspection_diff import compare
from llamagraph.planner import Planner
from llamagraph.program.launch import StepKey
from llamagraph.program.target import target_named
from llamagraph.timings import Timings

H200 = target_named("sm_90a")


def test_every_kernel_of_the_steps_loses_its_wait_once_a_setting():
    assert len(set(race.WITHOUT)) == len(race.WITHOUT)
    settings = {setting for _, setting in race.WITHOUT}
    found = {launch.kernel.name for s in settings for launch in race.launches(H200, s)}
    assert found == {name for name, _ in race.WITHOUT}
    for name, setting in race.WITHOUT:
        assert name in {launch.kernel.name for launch in race.launches(H200, setting)}


def test_a_copy_of_the_sources_has_its_changes(tmp_path):
    changes = {"common.cuh": (race.WAIT, race.late(4)), "stamp.cu": ("", speed.STAMP)}
    folder = copy_sources(tmp_path / "csrc", changes)
    header = (folder / "common.cuh").read_text()
    assert header.count(race.WAIT) == 1 and "100000" in header
    assert (folder / "stamp.cu").read_text() == speed.STAMP
    assert (folder / "gemv.cu").read_bytes() == (source_folder() / "gemv.cu").read_bytes()
    with pytest.raises(AssertionError, match="has not one"):
        copy_sources(tmp_path / "again", {"common.cuh": ("nothing like it", "")})


def test_steps_of_one_row_are_stamped_at_both_ends():
    planner = Planner(SyntheticFile("135m:q8_0"), H200, 100)
    program = planner.plan(StepKey())
    labels = [launch.label for launch in speed.stamped(program).launches]
    assert labels == ["begin", *(launch.label for launch in program.launches), "end"]
    prompt = planner.plan(StepKey(8))
    assert speed.stamped(prompt) is prompt


def test_counters_are_added_up_by_kernel():
    gemv = counters.Planned("1b:q4_k_m", "gemv", "Q4_K", 1000)
    plan = [gemv, gemv, counters.Planned("1b:q4_k_m", "choose", "-", 500)]
    values = [{"dram": 1100, "conflicts": 2, "sectors": 30, "sectors_ideal": 20},
              {"dram": 1000, "conflicts": 1, "sectors": 30, "sectors_ideal": 20},
              {"dram": 500}]
    header, products, choose, everything = counters.table(plan, values)
    assert products.split() == ["gemv", "Q4_K", "2", "0.00", "1.050", "3", "0", "0.000", "1.500"]
    assert choose.split()[3:5] == ["0.00", "1.000"]
    assert everything.split()[:4] == ["all", "3", "0.00", "1.040"]
    assert len(header.split()) == 10


@pytest.mark.parametrize("quant, cache", [("q4_k_m", "f16"), ("q8_0", "q8_0")])
def test_what_the_sanitizer_sees_runs_from_graphs_at_every_depth(quant, cache):
    assert (quant, cache) in sanitize.settings()
    sanitize.steps(quant, cache, CpuDevice(H200))


def test_the_kernels_of_races_are_named():
    said = [
        "========= COMPUTE-SANITIZER",
        "========= Error: Race reported between Write access at hopper_add+0x430",
        "=========     and Read access at hopper_add+0x770 [248 hazards]",
        "=========     and Read access at hopper_add+0x7a0 [2 hazards]",
        "=========",
        "========= Error: Race reported between Read access at norm(float *, int)+0xf0 in n.cu:4",
        "=========     and Write access at norm(float *, int)+0x280 in n.cu:6 [1 hazard]",
        "========= Error: Race reported between Write access at 0x90 in /a/b.cu:12:gemv(int)",
        "=========     and Write access at 0x90 in /a/b.cu:12:gemv(int) [1000 hazards]",
        "========= Error: Race reported between Write access at 0x10 in hopper_add",
        "=========     and Read access at 0x20 in hopper_add [50 hazards]",
        "========= RACECHECK SUMMARY: 4 hazards displayed (4 errors, 0 warnings)",
    ]
    assert list(sanitize.hazards(said)) == [
        "gemv: Write, Write: 1000 hazards",
        "hopper_add: Write, Read: 300 hazards",
        "norm: Read, Write: 1 hazards",
    ]
    assert not list(sanitize.hazards(said[-1:]))


def test_figures_are_the_readmes():
    assert decode_table.name("1b:q4_k_m") == "1B Q4_K_M"
    assert decode_table.figure(2895.1) == "2 895" and decode_table.figure(93.4) == "93"
    assert decode_table.figure(4071.2, 3) == "4 070" and decode_table.figure(423.4, 3) == "423"


def test_the_rate_of_an_answer_is_read_from_its_timings():
    line = next(timing_lines(Timings(0, 0.5, 1.5, 9, 512)))
    assert decode_table.SPEED.search(line).groups() == ("512", "511.0")


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_of_the_gpu_check_is_called_as_its_module_says(part):
    run = import_module(f"checks.{part.module}").run
    inspect.signature(run).bind(None, *([None] if part.takes else []))
    assert f"--{part.name}" in gpu.__doc__


def test_one_executable_can_serve_the_row_buckets_that_are_switched():
    planner = Planner(SyntheticFile("1b:q4_k_m"), target_named("sm_90a"), 512)
    diff = compare(*(inspected(planner, Setting(rows=n)) for n in graphs.BUCKETS))
    assert diff.topology_equal and not diff.same_program
