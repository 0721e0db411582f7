"""The real models against exact logits and llama.cpp's answers."""

import json

import numpy as np
import pytest

import llamagraph
from llamagraph.devices.cpu import CpuDevice
from llamagraph.gguf.reader import GGUFFile
from llamagraph.program.target import target_named
from llamagraph.runner import Runner

DATA = {
    "smollm2": "smollm2-135m-q4_1",
    "gemma3": "gemma3-270m-q4_k_m",
    "qwen": "qwen2.5-coder-0.5b-q4_k_m",
}
SURE = 0.05  # nats between the best two; below it rounding may decide


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def compare(logits: np.ndarray, case: dict) -> tuple[list[float], list[bool]]:
    """Errors of the log probabilities, and whether the likeliest token is the exact one's."""
    errors: list[float] = []
    found = log_softmax(logits)
    for row, ids, exact in zip(found, case["ids"], case["exact_logprobs"], strict=True):
        errors += np.abs(row[ids] - exact).tolist()
    return errors, (logits.argmax(-1) == case["exact_argmax"]).tolist()


def golden_errors(path, cases, target: str, single: bool, kv: str | None = None
                  ) -> tuple[float, float]:
    """Mean error and share of equal choices, teacher-forced; `single` feeds token by token."""
    runner = Runner(GGUFFile(path), CpuDevice(target_named(target)), "stream", n_ctx=2048,
                    type_k=kv, type_v=kv)
    errors, equal = [], []
    for case in cases:
        runner.reset()
        prompt, answer = case["prompt_tokens"], case["tokens"][:-1]
        logits = [runner.logits(prompt)[-1:]]
        logits += [runner.logits([t]) for t in answer] if single else [runner.logits(answer)]
        e, q = compare(np.concatenate(logits), case)
        errors += e
        equal += q
    return float(np.mean(errors)), float(np.mean(equal))


@pytest.mark.parametrize("name", DATA)
def test_numpy_meets_the_exact_logits(golden, model_path, name):
    cases = json.loads((golden / f"{DATA[name]}.json").read_text())["cases"]
    error, equal = golden_errors(model_path(name), cases, "numpy", single=False)
    assert error <= 0.01 and equal >= 0.995


@pytest.mark.parametrize("name", DATA)
def test_the_list_of_a_gpu_meets_them_on_numpy(golden, model_path, name):
    cases = json.loads((golden / f"{DATA[name]}.json").read_text())["cases"][:4]
    error, equal = golden_errors(model_path(name), cases, "sm_90a", single=True)
    assert error <= 0.10 and equal >= 0.97


@pytest.mark.parametrize("name", DATA)
def test_greedy_text_is_llama_cpps_where_the_choice_is_sure(golden, model_path, name):
    """llama.cpp quantises activations: its choice counts where it is the exact one, and sure."""
    cases = json.loads((golden / f"{DATA[name]}.json").read_text())["cases"]
    with llamagraph.open(model_path(name), device=CpuDevice(), n_ctx=2048) as model:
        for case in cases[:4]:
            answer = model.generate(case["prompt"], limit=len(case["tokens"]), temp=0)
            found = [id for id, _ in answer]
            assert answer.prompt_tokens == case["prompt_tokens"]
            for i, (token, expected) in enumerate(zip(found, case["tokens"], strict=False)):
                first, second = sorted(case["exact_logprobs"][i], reverse=True)[:2]
                if token != expected:
                    assert first - second <= SURE or expected != case["exact_argmax"][i]
                    break
            else:
                assert answer.text.startswith(case["text"][: len(answer.text)])


@pytest.mark.parametrize(("name", "limit", "share"), [
    ("smollm2", 0.10, 0.97), ("gemma3", 0.10, 0.97), ("qwen", 0.6, 0.93)
])
def test_a_quantised_kv_cache_stays_near_them(golden, model_path, name, limit, share):
    """Qwen's keys have large biases, which take the bits of all else."""
    cases = json.loads((golden / f"{DATA[name]}.json").read_text())["cases"][:2]
    error, equal = golden_errors(model_path(name), cases, "numpy", single=False, kv="q8_0")
    assert error <= limit and equal >= share
