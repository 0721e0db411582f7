"""Planning of products on warp groups: which weights and rows, tiles, stages, shared memory."""

import numpy as np
import pytest

from llamagraph.kernels.gemm_hopper import gemm_hopper, hopper_qkv
from llamagraph.kernels.layouts import layout, stored_bytes, tiles_of
from llamagraph.kernels.warp_groups import (
    TYPES,
    Stages,
    choose_stages,
    fits,
    plan,
    shared_bytes,
    takes,
    weight_bytes,
)
from llamagraph.planner import ROW_BUCKETS
from llamagraph.program.launch import Buffer, StepKey, Work, dense
from llamagraph.program.tape import Tape
from llamagraph.program.target import target_named

H200 = target_named("sm_90a")


def weight(dtype: str, n_out: int, n_in: int) -> Buffer:
    how = layout(H200, dtype, (n_out, n_in))
    size = stored_bytes(dtype, (n_out, n_in), how)
    return Buffer("w", "weights", 0, size, dtype, (n_out, n_in), how)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_bucket_has_a_tile_that_fits(dtype):
    for rows in ROW_BUCKETS[1:]:
        for n_in in (256, 1024, 2048, 14336):
            w = weight(dtype, 4096, n_in)
            assert takes(H200, w, rows)
            how = plan(H200, [w], rows)
            assert how.tile_rows < 2 * rows and min(how.stages) >= 2
            used = shared_bytes(weight_bytes([w]), how.tile_rows, how.stages)
            assert used <= H200.shared_per_block


@pytest.mark.parametrize(("dtype", "n_in", "rows", "target"), [
    ("F32", 4096, 512, "sm_90a"), ("Q3_K", 4096, 512, "sm_90a"), ("Q8_0", 96, 512, "sm_90a"),
    ("Q4_K", 4096, 1, "sm_90a"), ("Q4_K", 4096, 512, "sm_80"), ("Q4_K", 4096, 512, "sm_120"),
])
def test_what_is_left_to_other_kernels(dtype, n_in, rows, target):
    assert not takes(target_named(target), weight(dtype, 4096, n_in), rows)


@pytest.mark.parametrize(("outputs", "rows", "tile"), [
    ((4096,), 512, (256, 2)), ((4096,), 2048, (256, 1)), ((14336,), 512, (256, 1)),
    ((4096, 1024, 1024), 512, (256, 1)), ((14336, 14336), 2048, (256, 1)),
    ((4096,), 64, (32, 2)), ((4096, 1024, 1024), 128, (128, 2)),
])
def test_the_tile_that_is_done_first_on_an_h200(outputs, rows, tile):
    """Its rows, and how many blocks share its columns."""
    weights = [weight("Q4_K", n, 4096) for n in outputs]
    assert plan(H200, weights, rows)[:2] == tile


def test_a_split_has_whole_tiles_a_cluster_at_a_time_and_room_for_the_sums():
    for rows in ROW_BUCKETS[1:]:
        for shape in ((576, 1536), (1024, 512), (2048, 2048), (4096, 14336)):
            w = weight("Q4_K" if shape[1] % 256 == 0 else "Q8_0", *shape)
            how = plan(H200, [w], rows)
            tiles = rows // how.tile_rows * -(-shape[0] // 128)
            assert how.split == 1 or tiles * how.split <= H200.n_sm * how.blocks
            assert how.split <= tiles_of(w).n_tiles
            assert fits(weight_bytes([w]), how.tile_rows, how.split, how.stages, 1)
    # 7 of 8 blocks send 128 outputs of 8 rows, where two stages of 8 rows and 2 x 10 KiB are.
    small = weight_bytes([weight("Q4_1", 128, 1088)])
    assert not fits(small, 64, 8, Stages(1, 1), 1) and fits(small, 64, 8, Stages(2, 2), 1)
    # Two blocks, of which one gets no sums: for one tile alone.
    assert fits(small, 8, 2, Stages(2, 2), 1) and not fits(small, 8, 2, Stages(2, 2), 2)


def test_products_are_counted():
    """Twice the rows by the numbers of the weights, whatever is padded."""
    args, _ = next(iter(hopper_qkv.example(np.random.default_rng(0))))
    flops = hopper_qkv.flops(Work(n_rows=100), *args)
    assert flops == 2 * 100 * 1280 * (256 + 64 + 64)


def test_stages_and_barriers_make_the_shared_memory():
    # 64 columns of 256 rows as halves; 128 outputs times two units of 144 bytes.
    w = weight("Q4_K", 4096, 4096)
    assert weight_bytes([w]) == 36864
    assert shared_bytes(36864, 256, Stages(4, 2)) == 1056 + 4 * (32768 + 16) + 2 * (36864 + 16)
    assert choose_stages(H200, 36864, 256) == (4, 2)
    # Another layout in the same launch: the larger counts.
    larger = weight("Q6_K", 1024, 4096)
    assert weight_bytes([w, larger]) == weight_bytes([larger]) > 36864


def test_one_launch():
    tape = Tape(H200, StepKey(rows=128), {})
    w, n_rows = weight("Q6_K", 1000, 768), dense("n_rows", "io", 0, (1,), "I32")
    gemm_hopper(tape, w, dense("x", "scratch", 0, (12, 128, 64), "F16"), n_rows,
                dense("out", "scratch", 1 << 20, (128, 1000)), "ffn_up")
    (launch,) = tape.program().launches
    assert launch.kernel.name == "hopper_rows" and launch.args[-3:] == (768, 1000, 128)
    assert launch.geometry.block == 384 and launch.variant.startswith("Q6_K wgmma 128x")
    assert launch.traffic(Work(n_rows=100)) == (w.n_bytes + 2 * 100 * 768, 4 * 100 * 1000)


def test_layers_that_are_alike_are_planned_once():
    tape, asked = Tape(H200, StepKey(rows=128), {}), []
    for key in ("a", "b", "a"):
        assert tape.once(key, lambda key=key: asked.append(key) or key.upper()) == key.upper()
    assert asked == ["a", "b"]
