"""Every registered kernel, on its own examples: what it may touch, and that csrc agrees with it."""

import re

import numpy as np
import pytest
from conftest import REPOSITORY

from llamagraph.kernels import all_kernels
from llamagraph.kernels.examples import numpy_args
from llamagraph.program.target import target_named

KERNELS = all_kernels()
WITH_EXAMPLES = [name for name, kernel in KERNELS.items() if kernel.example]  # numpy's have none
POISONS = (0xFF, 0x7F)  # NaN in every float type, and a large number
IN_PART = {"chunks"}  # room for more than a row may need
ENTRY = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\([^()]*\)\s*)?(?:CLUSTER\s+)?'
    r"(\w+)\(([^)]*)\)", re.DOTALL
)


def cases(kernel):
    """The examples' arguments as numpy takes them, made once."""
    for args, constants in kernel.example(np.random.default_rng(0)):
        yield numpy_args(args), constants


def run(kernel, args, constants, poison):
    """The arguments after a call on copies, what is only written poisoned before."""
    copies = []
    for param, arg in zip(kernel.params, args, strict=True):
        arg = arg.copy() if isinstance(arg, np.ndarray) else arg
        if param.role and param.role.writes and not param.role.reads:
            arg.reshape(-1).view(np.uint8)[:] = poison
        copies.append(arg)
    with np.errstate(all="ignore"):
        kernel.reference(*copies, **constants)
    return copies


def same(a, b):
    return np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))


def poisoned(array, poison):
    """Which numbers are all poison."""
    return (array.reshape(-1).view(np.uint8) == poison).reshape(*array.shape, -1).all(axis=-1)


def is_panels(array):
    """Whether an output's rows are the second axis."""
    return array.dtype == np.float16 and array.ndim == 3


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_inputs_are_left_alone(name):
    kernel = KERNELS[name]
    for args, constants in cases(kernel):
        after = run(kernel, args, constants, POISONS[0])
        for param, before, now in zip(kernel.params, args, after, strict=True):
            if param.role and not param.role.writes:
                assert same(before, now), param.name


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_true_rows_are_written_and_no_others(name):
    """Two different poisons give the same numbers, so nothing of them was read."""
    kernel = KERNELS[name]
    names = [p.name for p in kernel.params]
    for args, constants in cases(kernel):
        first, second = (run(kernel, args, constants, poison) for poison in POISONS)
        n_rows = args[names.index("n_rows")][0] if "n_rows" in names else None
        for param, a, b in zip(kernel.params, first, second, strict=True):
            if not param.role or not param.role.writes:
                continue
            if param.role.reads:
                assert same(a, b), param.name
                continue
            left = poisoned(a, POISONS[0]) & poisoned(b, POISONS[1])
            if is_panels(a):
                a, b, left = (np.moveaxis(x, 1, 0) for x in (a, b, left))
            assert same(a[~left], b[~left]), param.name
            assert not left.all(), f"{param.name} is not written"
            if n_rows is not None:
                assert left[n_rows:].all(), f"{param.name}: rows past n_rows"
                assert param.name in IN_PART or not left[:n_rows].any(), f"{param.name}: true rows"


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_reference_is_deterministic(name):
    kernel = KERNELS[name]
    for args, constants in cases(kernel):
        first, second = (run(kernel, args, constants, POISONS[0]) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert same(a, b) if isinstance(a, np.ndarray) else a == b


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_geometry_of_an_example_fits_a_gpu(name):
    kernel, target = KERNELS[name], target_named("sm_90a")
    assert kernel.example
    for args, constants in kernel.example(np.random.default_rng(0)):
        geometry = kernel.geometry(target, *args, **constants)
        assert 0 < geometry.block <= 1024
        assert geometry.block % 32 == 0
        assert geometry.shared <= target.shared_per_block


def entries():
    """The entry points of csrc: file and parameters, by name."""
    found = {}
    for path in sorted((REPOSITORY / "csrc").glob("*.cu")):
        for name, params in ENTRY.findall(path.read_text()):
            found[name] = (path.name, [" ".join(p.split()) for p in params.split(",")])
    return found


def kind_of(param):
    """Name and kind of a parameter in C."""
    *kind, name = re.split(r"\b(?=\w+$)", param)
    return name, "buffer" if "*" in kind[0] else kind[0].strip()


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_entry_has_the_parameters_of_the_reference(name):
    kernel = KERNELS[name]
    source, params = entries()[name]
    assert source == kernel.source
    kinds: dict[type | None, str] = {int: "int", float: "float", None: "buffer"}
    wanted = [(p.name, kinds[p.type]) for p in kernel.params]
    assert [kind_of(p) for p in params] == wanted


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_what_is_only_read_is_const_in_csrc(name):
    _, params = entries()[name]
    for param, text in zip(KERNELS[name].params, params, strict=True):
        if param.role and not param.role.writes:
            assert text.startswith("const "), text


def test_every_entry_has_a_reference():
    no_example = set(entries()) - set(WITH_EXAMPLES)
    assert no_example == {"stamp"}, "a clock says what no reference can"
