"""Tiny random models of every architecture against a plain forward pass, in every mode."""

import math

import numpy as np
import pytest
from plain_forward import PlainModel
from tiny import ARCHITECTURES, N_VOCAB, tiny_model

from llamagraph.devices.cpu import CpuDevice
from llamagraph.execute import EXECUTORS
from llamagraph.gguf.reader import GGUFFile
from llamagraph.models.config import Rope
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams

CASES = [
    *((arch, quant, arch != "qwen3", arch == "llama")
      for arch in ARCHITECTURES for quant in ("F32", "Q8_0", "Q4_1")),
    ("llama", "F16", False, False), ("qwen2", "Q4_0", False, False),
    ("gemma3", "Q5_1", True, True), ("gemma3", "Q5_0", False, False),
    ("llama", "Q4_K", True, False), ("qwen3", "Q6_K", True, False),
    ("llama", "BF16", True, True),
]


def runner_of(path, mode="stream", **device) -> Runner:
    return Runner(GGUFFile(path), CpuDevice(**device), mode)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("arch, quant, tied, bias", CASES)
def test_matches_a_plain_forward_pass_in_every_mode(tmp_path, arch, quant, tied, bias):
    path = tiny_model(tmp_path / "m.gguf", arch, quant, tied=tied, bias=bias, n_layer=7)
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, 61).tolist()
    expected = PlainModel(path).logits(tokens)
    found = [runner_of(path, mode).logits(tokens) for mode in EXECUTORS]
    assert relative(found[0], expected) < 2e-5
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("scaling, rope_freqs", [("linear", False), ("yarn", False), (None, True)])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
def test_rope_scaling(tmp_path, arch, scaling, rope_freqs):
    path = tiny_model(tmp_path / "m.gguf", arch, scaling=scaling, rope_freqs=rope_freqs, n_layer=7)
    tokens = np.random.default_rng(2).integers(0, N_VOCAB, 90).tolist()
    assert relative(runner_of(path).logits(tokens), PlainModel(path).logits(tokens)) < 2e-5


def test_frequencies_are_scaled_as_published():
    """Linear: all of them. YaRN: in full behind the last pair of a ramp, not at all before it."""
    rng = np.random.default_rng(7)
    for _ in range(200):
        base, factor = rng.choice([1e4, 5e5, 1e6]), rng.uniform(1, 32)
        n_rot, trained = int(rng.choice([16, 64, 128])), int(rng.choice([64, 4096, 32768]))
        fast, slow, share = rng.uniform(8, 64), rng.uniform(0.5, 4), rng.choice([0.0, 0.5, 1.0])
        rope = Rope(base, n_rot, 1 / factor, share, trained, fast, slow, 1.5)

        def pair_that_turns(times, base=base, n_rot=n_rot, trained=trained):
            return n_rot * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

        first = max(0, math.floor(pair_that_turns(fast)))
        last = min(n_rot - 1, math.ceil(pair_that_turns(slow)))
        for i, found in enumerate(rope.inv_freq().tolist()):
            kept = share * (1 - min(1, max(0, (i - first) / max(last - first, 0.001))))
            frequency = base ** (-2 * i / n_rot)
            expected = frequency * (kept + (1 - kept) / factor)
            assert found == pytest.approx(expected, rel=1e-6)
        sharper = 1.5 * (0.1 * math.log(factor) + 1 if share else 1)
        assert rope.mscale == pytest.approx(sharper)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prefill_in_buckets_and_token_by_token_agree(tmp_path, arch):
    runner = runner_of(tiny_model(tmp_path / "m.gguf", arch, n_layer=7))
    tokens = np.random.default_rng(3).integers(0, N_VOCAB, 300).tolist()
    whole = runner.logits(tokens)
    runner.reset()
    single = np.concatenate([runner.logits([t]) for t in tokens])
    assert np.abs(whole - single).max() < 1e-4


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_generation_follows_the_logits(tmp_path, arch):
    path = tiny_model(tmp_path / "m.gguf", arch, n_layer=7)
    prompt = [5, 9, 200, 13]
    tokens = list(runner_of(path).generate(prompt, SamplingParams(temp=0, seed=0), 40))
    logits = PlainModel(path).logits(prompt + tokens)
    assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_a_sliding_window_uses_its_slots_in_a_ring(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", "gemma3", n_ctx=4000, n_layer=2)
    runner, tokens = runner_of(path), np.random.default_rng(4).integers(0, N_VOCAB, 2700).tolist()
    assert runner.kv.layers[0].k.shape[0] == 2304
    expected = PlainModel(path).logits(tokens)
    assert relative(runner.logits(tokens), expected) < 2e-5
