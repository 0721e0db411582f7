"""Planning of products by single warps: which weights and rows, shares, shared memory."""

import pytest

from llamagraph.kernels.few_rows import multiply
from llamagraph.kernels.layouts import layout, stored_bytes, tiles_of, unit_weights
from llamagraph.kernels.warp_groups import TYPES
from llamagraph.kernels.warp_plans import (
    WARPS,
    WARPS_BESIDE,
    Plan,
    Stored,
    plan,
    shared_bytes,
    takes,
)
from llamagraph.program.launch import Buffer, StepKey, Work, dense
from llamagraph.program.tape import Tape
from llamagraph.program.target import target_named

H200 = target_named("sm_90a")


def weight(dtype: str, n_out: int, n_in: int) -> Buffer:
    how = layout(H200, dtype, (n_out, n_in))
    size = stored_bytes(dtype, (n_out, n_in), how)
    return Buffer("w", "weights", 0, size, dtype, (n_out, n_in), how)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", TYPES)
def test_few_rows_have_a_plan_that_fits(dtype, target):
    device = target_named(target)
    for rows in (8, 16, 32):
        for n_out, n_in in ((64, 256), (1000, 1024), (2048, 2048), (4096, 14336)):
            w = weight(dtype, n_out, n_in)
            assert takes(device, w, rows)
            for parts in (1, 2):
                how = plan(device, [w], rows, parts)
                units = tiles_of(w).n_units // how.cluster
                assert how.tile_rows == rows and how.warps <= WARPS and how.split <= units
                stored = Stored(tiles_of(w).n_units, unit_weights(w), tiles_of(w).unit_bytes, False)
                assert how.stages >= 2 or stored.turns(how) * how.groups == 1
                assert how.cluster == 1 or target == "sm_90a"
                assert shared_bytes([w], how, parts) <= device.shared_per_block


@pytest.mark.parametrize(("dtype", "n_in", "rows", "target"), [
    ("F32", 4096, 8, "sm_90a"), ("Q3_K", 4096, 8, "sm_90a"), ("Q8_0", 96, 8, "sm_90a"),
    ("Q4_K", 4096, 1, "sm_90a"), ("Q4_K", 4096, 64, "sm_90a"), ("Q4_K", 4096, 8, "sm_75"),
    ("Q4_K", 4096, 8, "numpy"),
])
def test_what_is_left_to_other_kernels(dtype, n_in, rows, target):
    assert not takes(target_named(target), weight(dtype, 4096, n_in), rows)


def test_stages_and_sums_share_the_memory():
    # A step of 2 x 4 warps: 4 units of 256 columns of 32 rows as halves, 8 units of 16 outputs.
    w = weight("Q4_K", 4096, 4096)
    assert shared_bytes([w], Plan(32, 2, 4, 1, 3)) == 3 * (4 * 256 * 32 * 2 + 8 * 16 * 144)
    # Gate and up have twice the units; another type in the launch counts if it is larger.
    both = 3 * (4 * 256 * 32 * 2 + 16 * 16 * 144)
    assert shared_bytes([w], Plan(32, 2, 4, 1, 3), parts=2) == both
    larger = weight("Q6_K", 1024, 4096)
    more = 3 * (4 * 256 * 32 * 2 + 8 * 16 * 210)
    assert shared_bytes([w, larger], Plan(32, 2, 4, 1, 3)) == more
    # A row of 16 sums takes 20 floats.
    small = weight("Q4_0", 64, 64)
    assert shared_bytes([small], Plan(32, 4, 1, 1, 1)) == 4 * 32 * 20 * 4


def test_eight_rows_are_a_warps_own():
    # Each of 2 x 4 warps has 3 units of 16 outputs, the sums of its groups, and the rows' columns
    # of one unit, or of two where its groups are fewer than those 3.
    w = weight("Q4_K", 4096, 4096)
    assert shared_bytes([w], Plan(8, 2, 4, 1, 3, 3)) == 8 * (3 * 16 * 144 + 256 * 16 + 3 * 512)
    two = 8 * (3 * 16 * 144 + 2 * 256 * 16 + 2 * 512)
    assert shared_bytes([w], Plan(8, 2, 4, 1, 3, 2)) == two
    assert shared_bytes([w], Plan(8, 2, 4, 1, 3, 1), parts=2) == two
    # A warp that has all its columns at once puts the sums there.
    assert shared_bytes([w], Plan(8, 1, 16, 1, 2, 2)) == 16 * (2 * 16 * 144 + 256 * 16)
    assert shared_bytes([w], Plan(8, 1, 16, 1, 2, 9)) == 16 * (2 * 16 * 144 + 9 * 512)
    # Two small units are taken together, up to 256 columns and 4096 bytes of weights.
    assert [Stored(60, *sizes, False).share
            for sizes in ((64, 128), (64, 136), (128, 72), (256, 72))] == [2, 1, 2, 1]
    assert Stored(9, 64, 64, False).share == 1


def test_a_block_fits_beside_the_one_before_where_it_would_wait():
    # 128 blocks of 132 multiprocessors, and 36.
    assert plan(H200, [weight("Q4_K", 4096, 4096)], 8).warps <= WARPS_BESIDE
    assert plan(H200, [weight("Q8_0", 576, 1536)], 8).warps > WARPS_BESIDE


def test_one_launch():
    tape = Tape(H200, StepKey(rows=8), {})
    w, n_rows = weight("Q6_K", 1000, 768), dense("n_rows", "io", 0, (1,), "I32")
    multiply(tape, w, dense("x", "scratch", 0, (12, 8, 64), "F16"), n_rows,
             dense("out", "scratch", 1 << 20, (8, 1000)), "ffn_up")
    (launch,) = tape.program().launches
    assert launch.kernel.name == "warps_rows" and launch.args[-1] == 1000
    assert launch.variant.startswith("Q6_K mma 16x8")
    assert launch.traffic(Work(n_rows=5)) == (w.n_bytes + 2 * 5 * 768, 4 * 5 * 1000)
