"""Contexts that drop tokens on the GPU where layers' rings wrap: as on numpy, in every mode."""

import numpy as np
import pytest
from tiny import tiny_model

from llamagraph.devices import open_device
from llamagraph.devices.cpu import CpuDevice
from llamagraph.execute import EXECUTORS
from llamagraph.gguf.reader import GGUFFile
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams

N_CTX, KEEP = 2400, 3
TOKENS = [i * 7 % 250 for i in range(N_CTX)]


def opened(path, device, types):
    return Runner(GGUFFile(path), device, "stream", N_CTX, type_k=types[0], type_v=types[1])


@pytest.mark.parametrize("quant, types, limit", [
    ("F16", ("f32", "f32"), 5e-3), ("Q4_K", ("q8_0", "q4_0"), 5e-2)])
def test_rings(gpu, tmp_path, quant, types, limit):
    path = tiny_model(tmp_path / "m.gguf", "gemma3", quant, n_ctx=N_CTX, n_layer=6)
    found = []
    for device in (open_device("cuda", warn=print), CpuDevice(gpu.target)):
        runner = opened(path, device, types)
        assert runner.kv.layers[0].k.shape[0] < N_CTX == runner.kv.layers[5].k.shape[0]
        runner.prefill(TOKENS)
        runner.shift(KEEP)
        found.append(runner.logits([5, 6, 7]))
        runner.close()
    error = np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[1])
    assert error < limit, error


def test_modes(gpu, tmp_path):
    path = tiny_model(tmp_path / "m.gguf", "gemma3", "Q4_K", n_ctx=N_CTX, n_layer=6)
    runner, texts = opened(path, open_device("cuda", warn=print), ("f16", "q8_0")), []
    for mode in EXECUTORS:
        runner.use(mode)
        runner.reset()
        texts.append(list(runner.generate(TOKENS[:-10], SamplingParams(seed=3), 1300, keep=KEEP)))
        assert runner.n_shifts == 2
    runner.close()
    assert len(texts[0]) == 1300 and all(text == texts[0] for text in texts)


def test_a_ring_without_all_its_memory_moves(gpu, tmp_path):
    """A sequence that has not filled the context yet drops tokens for a text that has."""
    path = tiny_model(tmp_path / "m.gguf", "gemma3", "Q4_K", n_ctx=4000, n_layer=6)
    runner = Runner(GGUFFile(path), open_device("cuda", warn=print), "capture", 2500)
    tokens = [i * 7 % 250 for i in range(1400)]
    runner.prefill(tokens)
    assert runner.kv.usable < runner.kv.layers[0].k.shape[0]
    left = runner.resume([*tokens[1250:], 9], 0)
    assert left == [9] and runner.n_past == 150
    assert np.isfinite(runner.logits(left)).all()
    runner.close()
