"""Adapted models on the GPU: every mode the same bits, near numpy's run of the same launches."""

import numpy as np
import pytest
from adapter_files import EMBEDDING, write_adapter
from tiny import N_VOCAB, tiny_model

from llamagraph.adapters import Adapters
from llamagraph.devices import open_device
from llamagraph.devices.cpu import CpuDevice
from llamagraph.execute import EXECUTORS
from llamagraph.gguf.reader import GGUFFile
from llamagraph.runner import Runner

LAYER = [f"{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate",
                                       "ffn_up", "ffn_down")]
TOKENS = np.random.default_rng(1).integers(0, N_VOCAB, 200).tolist()


def logits_of(model, sources, device, mode, scales):
    """For each set of scales: of many rows, of a few, of single ones."""
    file, found = GGUFFile(model), []
    with Adapters(sources, file) as adapters:
        runner = Runner(file, device, mode, 512, adapters=adapters)
    for values in scales:
        runner.reset()
        for name, scale in zip(list(adapters.scales), values, strict=True):
            adapters.set(name, scale)
        adapters.write(device.memory, runner.io)
        for part in (TOKENS[:-12], TOKENS[-12:-6], *([t] for t in TOKENS[-6:])):
            found.append(runner.logits(part))
    runner.close()
    return np.concatenate(found)


# Activations are int8 where weights are Q4_K: a last bit before the rounding is a step behind it,
# and 2e-7 of the norms' weights already change logits by 2e-3.
@pytest.mark.parametrize("quant, limit", [("Q4_K", 1e-2), ("F16", 5e-3)])
def test_every_mode_gives_the_same_bits_near_numpys(gpu, tmp_path, quant, limit):
    model = tiny_model(tmp_path / "m.gguf", quant=quant, tied=False)
    sources = [
        write_adapter(tmp_path / "a.gguf", model, [*LAYER, "output.weight", EMBEDDING], 5),
        write_adapter(tmp_path / "b.gguf", model, LAYER[:3], 64, 0.0, "Q8_0", seed=2),
        write_adapter(tmp_path / "c.gguf", model, LAYER[4:], 16, -3.0, "F16", seed=3),
    ]
    scales = [(0.5, 0.3, 0.7), (0.25, -0.3, 0.7), (0, 0.5, 0), (0, 0, 0)]
    found = {mode: logits_of(model, sources, open_device("cuda", warn=print), mode, scales)
             for mode in EXECUTORS}
    assert all(np.array_equal(found["stream"], other) for other in found.values())
    expected = logits_of(model, sources, CpuDevice(gpu.target), "stream", scales)
    error = np.linalg.norm(found["stream"] - expected) / np.linalg.norm(expected)
    assert error < limit, error
