"""The device's choice of a token against the host's chain, on random logits and parameters.

1000 sets of parameters that the device's chain can serve, each with several positions: the tokens
must be equal, so the candidates and their probabilities are, as far as draws can show.
"""

from typing import Any

import numpy as np

from checks.examples import place
from checks.report import Report
from llamagraph.devices import open_device
from llamagraph.kernels.sample import MAX_TOP_K, choose_chain
from llamagraph.kernels.step import MAX_BIAS, SAMPLER_FLOATS, SAMPLER_INTS
from llamagraph.program.target import target_named
from llamagraph.sampling import BANNED, SamplingParams
from llamagraph.sampling_host import HostChain

N_SETS, N_TOKENS, N_SLICES = 1000, 64, 40
SIZES = (300, 5000, 128256)


def random_params(rng: np.random.Generator, n_vocab: int) -> SamplingParams:
    """Parameters that a GPU's chain can serve."""
    bias = {int(i): float(x) for i, x in zip(rng.integers(0, n_vocab, 3), (2.0, -5.0, BANNED),
                                              strict=True)}
    return SamplingParams(
        temp=float(rng.choice([0.0, 0.5, 0.8, 1.0, 2.0])), seed=int(rng.integers(1 << 62)),
        top_k=int(rng.integers(1, MAX_TOP_K + 1)), top_p=float(rng.choice([0.3, 0.95, 1.0])),
        min_p=float(rng.choice([0.0, 0.05, 0.3])), typical=float(rng.choice([0.5, 0.9, 1.0, 1.0])),
        repeat_penalty=float(rng.choice([1.0, 1.3])), repeat_last_n=int(rng.integers(-1, 70)),
        presence_penalty=float(rng.choice([0.0, 0.4])),
        frequency_penalty=float(rng.choice([0.0, 0.2])), logit_bias=bias,
    )


def buffers_for(n_vocab: int) -> tuple[Any, dict[str, Any]]:
    """The launch of a choice, and its buffers by name."""
    ints, floats = np.zeros(len(SAMPLER_INTS), np.int32), np.zeros(len(SAMPLER_FLOATS), np.float32)
    tokens = np.zeros(N_TOKENS + 1, np.int32)
    example = place(choose_chain(), (
        np.zeros((1, n_vocab), np.float32), floats, ints, np.zeros(MAX_BIAS, np.int32),
        np.zeros(MAX_BIAS, np.float32), np.zeros((N_SLICES * MAX_TOP_K, 2), np.uint32),
        np.zeros(4, np.uint32), tokens[:1], tokens[:1], tokens, tokens, n_vocab,
    ))
    return example, {param.name: buffer for param, buffer, _ in example.buffers()}


def chosen(device: Any, call: Any, io: dict[str, Any], position: int, sequence: list[int]) -> int:
    memory = device.memory
    for name, values in (("pos", [position - 1]), ("n_rows", [1]), ("tokens", sequence)):
        memory.write(io[name], np.array(values, np.int32))
    device.queue.launch(device.queue.bind(call))
    device.queue.wait()
    return int(memory.read(io["tokens"])[position])


def check_size(device: Any, n_vocab: int, n_sets: int) -> int:
    """How many of the tokens differ, of 4 for each set of parameters."""
    rng, wrong = np.random.default_rng(n_vocab), 0
    example, io = buffers_for(n_vocab)
    device.memory.grow("scratch", 0, example.n_bytes)
    device.memory.write(io["counters"], np.zeros(4, np.uint32))
    call = example.launch(device.target).resolve({}, device.memory.address)
    for _ in range(n_sets):
        params = random_params(rng, n_vocab)
        assert params.sampler(target_named("sm_90a"), n_vocab) in ("chain", "greedy")
        logits = (rng.uniform(0.5, 5) * rng.standard_normal(n_vocab)).astype(np.float32)
        device.memory.write(io["logits"], logits)
        params.write(device.memory, io)
        sequence = rng.integers(0, 40, N_TOKENS).tolist()
        for position in (1, 20, 40, N_TOKENS):
            found = chosen(device, call, io, position, sequence)
            wrong += found != HostChain(params).choose(logits, sequence[:position])
    return wrong


def run(report: Report) -> None:
    device = open_device("cuda", warn=print)
    device.memory.reserve("scratch", 1 << 28)
    for n_vocab in SIZES:
        n_sets = N_SETS if n_vocab < 10_000 else N_SETS // 10
        with report.check("choice", f"{n_vocab} logits"):
            wrong = check_size(device, n_vocab, n_sets)
            report.add("choice", f"{n_vocab} logits, tokens", not wrong,
                       f"{wrong} of {4 * n_sets} differ from the host's")
    device.close()
