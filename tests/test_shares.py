"""How products are shared out, by rule and as measured; the file of what was measured."""

from dataclasses import replace

import pytest

from llamagraph.devices.cuda.tuning import read_tuning, tuning_file, write_tuning
from llamagraph.kernels.layouts import layout, stored_bytes, tiles_of
from llamagraph.kernels.shares import WARPS, matrix_key, possible_shares, shares
from llamagraph.program.launch import Buffer
from llamagraph.program.target import target_named

H200 = target_named("sm_90a")


def weight(dtype: str, n_out: int, n_in: int) -> Buffer:
    order = layout(H200, dtype, (n_out, n_in))
    n_bytes = stored_bytes(dtype, (n_out, n_in), order)
    return Buffer("w", "weights", 0, n_bytes, dtype, (n_out, n_in), order)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype, n_out, n_in", [
    ("Q4_K", 4096, 14336), ("Q8_0", 576, 576), ("F16", 8192, 2048), ("Q6_K", 128256, 4096),
])
def test_the_rule_is_one_of_what_is_possible(dtype, n_out, n_in, parts):
    w = [weight(dtype, n_out, n_in)] * parts
    possible = list(possible_shares(w, parts))
    assert shares(H200, w, parts) in possible
    assert all(s["TEAMS"] * s["SPLIT"] * parts <= WARPS for s in possible)
    assert all(s["SPLIT"] <= tiles_of(w[0]).n_tiles for s in possible)


def test_what_was_measured_comes_before_the_rule():
    w, other = weight("Q4_K", 4096, 4096), weight("Q4_K", 4096, 14336)
    tuned = replace(H200, tuning=((matrix_key([w]), 1, 4),))
    assert shares(tuned, [w]) == {"TEAMS": 1, "SPLIT": 4} != shares(H200, [w])
    assert shares(tuned, [other]) == shares(H200, [other])


def test_the_file_is_read_back_and_a_damaged_one_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMAGRAPH_CACHE", str(tmp_path))
    path, said = tuning_file("NVIDIA H200 / 2"), []
    assert path.name == "NVIDIA-H200-2.json" and read_tuning(path, said.append) == ()
    tuning = (("Q4_K rows16 4096 4096 1", 2, 8),)
    write_tuning(path, tuning)
    assert read_tuning(path, said.append) == tuning and said == []
    for damage in ("", "[1]", '{"key": 3}', '{"key": [1]}'):
        path.write_text(damage)
        assert read_tuning(path, said.append) == ()
    assert len(said) == 4 and all(line.startswith(str(path)) for line in said)
