"""Sequences that keep their KV, and contexts that drop tokens when they are full."""

import numpy as np
import pytest
from tiny import tiny_model

import llamagraph
from llamagraph.devices.cpu import CpuDevice
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.kv import Cache
from llamagraph.kernels.rope import rotate
from llamagraph.kernels.shift import kv_shift
from llamagraph.planner import SHIFT
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams
from llamagraph.sequence import folded, n_dropped
from llamagraph.text.matcher import Constraint

GREEDY = SamplingParams(temp=0, seed=0)
DRAWN = SamplingParams(seed=7, temp=2, top_k=0, top_p=1, min_p=0, repeat_penalty=1.1)
MODES = ("stream", "capture", "build", "partial", "loop")
N_CTX = 48
TYPES = {"llama": ("f16", "bf16"), "qwen3": ("bf16", "f32"), "gemma3": (None, None)}  # of the KV


def open_runner(path, mode="stream", n_ctx=N_CTX):
    return Runner(GGUFFile(path), CpuDevice(), mode, n_ctx)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    n_layer = 6 if request.param == "gemma3" else 2  # the sixth sees everything
    return tiny_model(folder / f"{request.param}.gguf", request.param, n_ctx=2048,
                      n_layer=n_layer)


def check_modes(path, modes, types, params, keep):
    """Tokens and KV of three contexts by mode; nothing is made anew in the second half."""
    found, kv = {}, {}
    for mode in modes:
        runner = Runner(GGUFFile(path), CpuDevice(), mode, N_CTX, type_k=types[0], type_v=types[1])
        answer = runner.generate([1, 2, 3, 4, 5, 6], params, 3 * N_CTX, keep=keep)
        found[mode] = [next(answer) for _ in range(N_CTX + N_CTX // 2)]
        made, used = runner.executors.made, runner.device.memory.account()
        found[mode] += list(answer)
        assert SHIFT in runner.executors
        assert runner.executors.made == made and runner.device.memory.account() == used
        kv[mode] = runner.device.memory._arenas["kv"].tobytes()
        assert runner.sequence[:keep] == [1, 2, 3, 4, 5, 6][:keep]
    assert all(len(tokens) == 3 * N_CTX for tokens in found.values())
    assert all(found[mode] == found["stream"] for mode in modes)
    assert all(kv[mode] == kv["stream"] for mode in modes)


@pytest.mark.parametrize("params, keep", [(GREEDY, 0), (DRAWN, 5)])
def test_modes_agree_over_three_contexts(path, params, keep):
    types = next(types for name, types in TYPES.items() if name in path.name)
    check_modes(path, MODES, types, params, keep)


@pytest.mark.parametrize("types", [("q8_0", "q4_0"), ("q4_0", "f16")])
def test_quantised_kv(tmp_path, types):
    path = tiny_model(tmp_path / "m.gguf", "qwen3", "Q4_K")
    check_modes(path, ("stream", "build", "loop"), types, DRAWN, 3)
    runner = Runner(GGUFFile(path), CpuDevice(), "stream", N_CTX, type_k=types[0], type_v=types[1])
    runner.prefill(range(N_CTX))
    layer, shape = runner.kv.layers[0], runner.config.layers[0]
    caches = [Cache(runner.device.memory.view(x), x.dtype, *x.shape[1:])
              for x in (layer.k, layer.v)]
    k, v = caches[0].read(slice(None)), caches[1].array.copy()
    step = runner.shift(3)
    inv_freq = runner.config.ropes[runner.config.rope_of[0]].inv_freq()
    rotate(k, np.cos(step * inv_freq), -np.sin(step * inv_freq), shape.neox)
    moved = caches[0].read(slice(3, N_CTX - step))
    lost = np.linalg.norm(moved - k[3 + step :]) / np.linalg.norm(moved)
    assert lost < {"q8_0": 0.01, "q4_0": 0.12}[types[0]]
    assert np.array_equal(caches[1].array[3 : N_CTX - step], v[3 + step :])


def test_a_host_sampler_goes_on(path):
    params = SamplingParams(seed=3, mirostat=2)
    texts = [list(open_runner(path, mode).generate([1, 2, 3], params, 100, keep=0))
             for mode in MODES]
    assert len(texts[0]) == 100 and texts == [texts[0]] * len(MODES)


def keys_and_values(runner, i, positions):
    layer = runner.kv.layers[i]
    return [runner.device.memory.read(b)[np.array(positions) % b.shape[0]].astype(np.float64)
            for b in (layer.k, layer.v)]


def check_moved(runner, keep, before, step):
    """Each layer against the rotation of complex numbers by the distance."""
    n, windows = runner.n_past, runner.kv._windows
    for i, shape in enumerate(runner.config.layers):
        first = max(keep, n + 1 - windows[i]) if windows[i] else keep
        k, v = keys_and_values(runner, i, range(first, n))
        old_k, old_v = before[i][0][first + step : n + step], before[i][1][first + step : n + step]
        inv_freq = runner.config.ropes[runner.config.rope_of[i]].inv_freq().astype(np.float64)
        turned = old_k.copy()
        rotate(turned, np.cos(step * inv_freq), -np.sin(step * inv_freq), shape.neox)
        assert np.abs(k - turned).max() < 1e-4  # angles are rounded
        assert np.array_equal(v, old_v)


@pytest.mark.parametrize("n_ctx, keep", [(96, 0), (97, 13), (2400, 3)])
def test_moved_keys_are_turned_and_values_are_not(path, n_ctx, keep):
    """A context of 2400 makes the ring of a window of 24 wrap."""
    runner = open_runner(path, n_ctx=n_ctx)
    tokens = [i * 7 % 250 for i in range(n_ctx)]
    runner.prefill(tokens)
    runner.reset(n_ctx)
    before = []
    for i in range(len(runner.kv.layers)):
        slots = runner.kv.layers[i].k.shape[0]
        held = range(max(0, n_ctx - slots), n_ctx)
        parts = [np.zeros((n_ctx, *x.shape[1:])) for x in keys_and_values(runner, i, held)]
        for part, found in zip(parts, keys_and_values(runner, i, held), strict=True):
            part[held.start :] = found
        before.append(parts)
    step = runner.shift(keep)
    assert step == n_dropped(n_ctx, keep) and runner.n_past == n_ctx - step
    assert runner.sequence == tokens[:keep] + tokens[keep + step :]
    check_moved(runner, keep, before, step)


def test_what_a_ring_has_lost_is_read_again(tmp_path):
    """A window of 2500 in a ring of 4608 slots: 1051 is seen, 1392 is the first that is held."""
    n = 6000
    path = tiny_model(tmp_path / "m.gguf", "gemma3", n_ctx=n, n_layer=1)
    wide = {"gemma3.attention.sliding_window": 2500}
    runner, fresh = (Runner(GGUFFile(path, wide), CpuDevice(), "stream", n) for _ in range(2))
    tokens = [i * 7 % 250 for i in range(n)]
    runner.prefill(tokens)
    runner.kv.stored(n)
    assert not runner.kv.shifts(n, 1100, n_dropped(n, 1100))
    assert runner.kv.shifts(n, 900, n_dropped(n, 900))
    step = runner.shift(1100)
    fresh.prefill(tokens[:1100] + tokens[1100 + step :])
    fresh.reset(runner.n_past)
    assert runner.sequence == fresh.sequence
    assert np.array_equal(runner.logits([5]), fresh.logits([5]))


def test_only_new_tokens_are_read(path):
    runner, fresh = open_runner(path, n_ctx=512), open_runner(path, n_ctx=512)
    first = [i * 5 % 250 for i in range(200)]
    answer = list(runner.generate(first, GREEDY, 20))
    longer = [*first, *answer, 9, 8, 7]
    left = runner.resume(longer)
    assert left == longer[219:]  # the last token of the answer had not been read
    logits = runner.read_logits(runner.prefill(left))
    expected = fresh.read_logits(fresh.prefill(longer))
    assert np.abs(logits - expected).max() < 1e-3
    assert runner.resume(longer) == longer[-1:]
    assert runner.resume(longer[:100]) == longer[99:100]
    assert runner.resume([3, *longer]) == [3, *longer]


def test_a_ring_goes_back_as_far_as_it_holds(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", "gemma3", n_ctx=4096, n_layer=1)
    runner = open_runner(path, n_ctx=4096)
    tokens = [i * 5 % 250 for i in range(3500)]
    runner.prefill(tokens)
    assert runner.resume([*tokens[:2900], 1]) == [1]
    assert len(runner.resume([*tokens[:1000], 1])) == 1001
    runner.prefill(tokens)
    runner.reset(1000)  # the tokens are there again, read anew
    fresh = open_runner(path, n_ctx=4096)
    fresh.prefill(tokens[:1000])
    runner.write_tokens([5])
    fresh.write_tokens([5])
    for r in (runner, fresh):
        r.reset(1000)
    a, b = (r.logits([5]) for r in (runner, fresh))
    assert np.abs(a - b).max() < 1e-3


def test_a_chat_that_is_longer_than_the_context_goes_on(path):
    """What the fold of all tokens leaves is what shifts leave: only new tokens are read."""
    runner = open_runner(path, n_ctx=96)
    text, keep = [1, 2, 3, 4], 2
    for turn in range(12):
        prompt = folded(text, 96, keep)
        left = runner.resume(prompt, keep)
        assert len(left) <= 1 + 6 or turn == 0
        answer = list(runner.generate(left, GREEDY, 20, keep=keep))
        text += [*answer, 5, 6, 7, 8, 9]
        assert folded(text, 96, keep)[: len(runner.sequence)] == runner.sequence or len(
            folded(text, 96, keep)) < len(runner.sequence)
    assert len(text) > 2.5 * 96


@pytest.mark.parametrize("n_ctx, keep", [(96, 0), (96, 5), (97, 5), (10, 8), (10, 9), (10, 10)])
def test_folding_is_what_dropping_does(n_ctx, keep):
    step, kept = n_dropped(n_ctx, keep), list(range(n_ctx))
    assert (n_ctx - keep) / 2 <= step <= (n_ctx - keep + 1) / 2 or step == 0
    for token in range(n_ctx, 4 * n_ctx if step else n_ctx):
        if len(kept) == n_ctx:
            del kept[keep : keep + step]
        kept.append(token)
        assert folded(range(token + 1), n_ctx, keep) == kept


def test_the_python_face(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", n_ctx=64)
    with llamagraph.open(path, device=CpuDevice()) as model:
        answer = model.generate("hello", limit=200, ignore_eos=True, context_shift=True, keep=-1)
        assert len(list(answer)) == 200 and answer.stop_reason == "limit"
        again = model.generate("hello", limit=5, ignore_eos=True)
        list(again)
        assert again.timings.n_prompt == 1
        assert again.timings.n_reused == len(again.prompt_tokens) - 1
        anew = model.generate("hello", limit=5, ignore_eos=True, reuse=False)
        list(anew)
        assert anew.timings.n_reused == 0
        short = model.generate([7] * 60, ignore_eos=True)
        assert len(list(short)) == 5 and short.stop_reason == "context"
        rule = model.generate("hello", limit=150, grammar="root ::= [a-z ]+", context_shift=True,
                              temp=0)
        assert list(rule) and set(rule.text) <= set("abcdefghijklmnopqrstuvwxyz ")
        assert isinstance(rule.timings.constraint, Constraint)


def test_a_stale_answer_changes_nothing(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", n_ctx=64)
    runner = open_runner(path, n_ctx=64)
    stale = runner.generate([1, 2], GREEDY, 9)
    next(stale)
    runner.reset()
    answer = runner.generate([3, 4], GREEDY, 9)
    next(answer)
    with pytest.raises(llamagraph.LlamaGraphError, match="another answer"):
        next(stale)
    assert len(list(answer)) == 8 and runner.n_past == 10


def test_the_reference_may_work_in_place():
    """A cache from itself, and from a copy: the same where no slot is both read and written."""
    for args, constants in kv_shift.example(np.random.default_rng(1)):
        k, v, _, _, inv_freq, moved, n_slots = args
        if moved[1] > n_slots or moved[2] < moved[1] - moved[0]:
            continue
        one, two = [k.copy(), v.copy()], [k.copy(), v.copy()]
        kv_shift.reference(*one, *one, inv_freq, moved, n_slots, **constants)
        kv_shift.reference(k, v, *two, inv_freq, moved, n_slots, **constants)
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
