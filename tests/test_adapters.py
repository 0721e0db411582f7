"""LoRA adapters: tiny models against merged weights, in every mode; what is refused, and how."""

import json

import numpy as np
import pytest
from adapter_files import EMBEDDING, keys, merged, pairs_of, write_adapter
from click.testing import CliRunner
from gguf_files import Tensor, gguf_bytes
from plain_forward import PlainModel
from tiny import ARCHITECTURES, N_VOCAB, tiny_model

import llamagraph
from llamagraph.adapters import Adapters
from llamagraph.cli import cli
from llamagraph.cli.lora import read_files, read_scaled
from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import FormatError, LlamaGraphError, MemoryLimitError
from llamagraph.execute import EXECUTORS
from llamagraph.gguf.reader import GGUFFile
from llamagraph.planner import Planner
from llamagraph.program.launch import StepKey
from llamagraph.program.target import target_named
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams

LAYER = [f"{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate",
                                       "ffn_up", "ffn_down")]
GREEDY = SamplingParams(temp=0, seed=0)


def runner_of(model, sources, mode="stream", target="numpy", **device) -> Runner:
    file = GGUFFile(model)
    return Runner(file, CpuDevice(target_named(target), **device), mode,
                  adapters=Adapters(sources, file))


def logits_of(runner, tokens):
    """Many rows, a few, then single ones."""
    parts = [tokens[:-12], tokens[-12:-6], *([t] for t in tokens[-6:])]
    return np.concatenate([runner.logits(part) for part in parts])


def rescale(runner, name, scale):
    """What a model does for `scale_adapter`."""
    runner.reset()
    runner.adapters.set(name, scale)
    runner.adapters.write(runner.device.memory, runner.io)


def relative(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def some_tokens(n=61):
    return np.random.default_rng(1).integers(0, N_VOCAB, n).tolist()


# ---- What is computed ----


@pytest.mark.parametrize("arch, quant, bias", [
    *((arch, "F32", False) for arch in ARCHITECTURES), ("llama", "Q8_0", True),
])
def test_every_matrix_adapted_is_as_merged_in_every_mode(tmp_path, arch, quant, bias):
    model = tiny_model(tmp_path / "m.gguf", arch, quant, tied=False, bias=bias, n_layer=7)
    adapter = write_adapter(tmp_path / "a.gguf", model, [*LAYER, "output.weight", EMBEDDING])
    tokens, plain = some_tokens(), PlainModel(model)
    expected = merged(model, {adapter: 0.25}).logits(tokens)
    found = [logits_of(runner_of(model, [(adapter, 0.25)], mode), tokens) for mode in EXECUTORS]
    assert relative(found[0], expected) < 3e-5
    assert relative(plain.logits(tokens), expected) > 0.1, "the adapter does something"
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("target", ["numpy", "sm_90a", "sm_80"])
@pytest.mark.parametrize("targets", [
    ["attn_q.weight"], ["attn_k.weight", "attn_v.weight"], ["attn_output.weight"],
    ["ffn_gate.weight"], ["blk.1.ffn_up.weight"], ["ffn_down.weight"], ["output.weight"],
    [EMBEDDING],
])
def test_matrices_adapted_alone(tmp_path, target, targets):
    model = tiny_model(tmp_path / "m.gguf", quant="Q4_K", tied=False)
    targets = [t if "blk" in t or t == EMBEDDING else f".{t}" for t in targets]
    targets = ["output.weight"] if targets == [".output.weight"] else targets
    adapter = write_adapter(tmp_path / "a.gguf", model, targets, rank=5)
    tokens = some_tokens()
    expected = merged(model, {adapter: 2.0}).logits(tokens)
    found = [logits_of(runner_of(model, [(adapter, 2.0)], mode, target), tokens)
             for mode in EXECUTORS]
    limit = 3e-5 if target == "numpy" else 0.03  # activations are F16 and int8 there
    assert relative(found[0], expected) < limit
    assert relative(PlainModel(model).logits(tokens), expected) > 0.06
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_a_tied_embedding_is_adapted_where_it_is_looked_up_alone(tmp_path):
    model = tiny_model(tmp_path / "m.gguf", "gemma3", tied=True)
    adapter = write_adapter(tmp_path / "a.gguf", model, [EMBEDDING])
    expected = merged(model, {adapter: 1.0}).logits(some_tokens())
    assert relative(logits_of(runner_of(model, [adapter]), some_tokens()), expected) < 3e-5


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A model and three adapters: of other types, ranks, matrices and alphas."""
    folder = tmp_path_factory.mktemp("several")
    model = tiny_model(folder / "m.gguf")
    return model, [
        write_adapter(folder / "one.gguf", model, LAYER, 8, 16.0, "F16", seed=1),
        write_adapter(folder / "two.gguf", model, LAYER[:3], 64, 0.0, "Q8_0", seed=2),
        write_adapter(folder / "three.gguf", model, [*LAYER[4:], EMBEDDING], 1, -3.0, "BF16", 3),
    ]


@pytest.mark.parametrize("mode", EXECUTORS)
def test_several_adapters_add_up(several, mode):
    model, files = several
    scales = dict(zip(files, (0.5, 0.3, -0.7), strict=True))
    runner = runner_of(model, scales.items(), mode)
    expected = merged(model, scales).logits(some_tokens())
    assert relative(logits_of(runner, some_tokens()), expected) < 3e-5
    assert runner.executors[runner.adapters.key(StepKey(1, "all"))].program.key.adapters == (
        "one", "two", "three")


def test_the_same_file_twice_counts_twice(several):
    model, files = several
    runner = runner_of(model, [files[0], (files[0], 0.5)])
    assert list(runner.adapters.scales) == ["one", "one#2"]
    expected = merged(model, {files[0]: 1.5}).logits(some_tokens())
    assert relative(logits_of(runner, some_tokens()), expected) < 3e-5


def test_an_adapter_of_scale_0_is_the_base_bit_for_bit(several):
    model, files = several
    base = Runner(GGUFFile(model), CpuDevice())
    runner = runner_of(model, [(file, 0) for file in files])
    assert np.array_equal(logits_of(base, some_tokens()), logits_of(runner, some_tokens()))
    made = {e.program.key for e in runner.executors.values()}
    assert made == {e.program.key for e in base.executors.values()}


def launches(runner, key):
    return [(x.kernel.name, x.label) for x in runner.plan(key).launches]


@pytest.mark.parametrize("mode", EXECUTORS)
def test_a_scale_lives_on_the_device_and_changes_no_graph(several, mode):
    model, files = several
    runner, tokens = runner_of(model, [(files[0], 0.5), (files[1], 0)], mode), some_tokens()
    for one, two, made in ((0.5, 0, 3), (0.25, 0, 3), (0.25, 1, 6), (0, 0, 9), (0.5, -1, 9)):
        rescale(runner, "one", one)
        rescale(runner, "two", two)
        expected = merged(model, {files[0]: one, files[1]: two}).logits(tokens)
        assert relative(logits_of(runner, tokens), expected) < 3e-5
        assert runner.executors.made == made, "only another set of adapters is another program"
    assert all(e.updates == 0 for e in runner.executors.values())


def likeliest(plain, prompt, tokens, banned):
    logits = plain.logits(prompt + tokens)[len(prompt) - 1 : -1]
    logits[:, list(banned)] = -np.inf
    return logits.argmax(-1).tolist()


def test_answers_follow_the_adapters(several):
    model, files = several
    prompt, found = [5, 9, 200, 13], []
    for mode in EXECUTORS:
        with llamagraph.open(model, device=CpuDevice(), mode=mode, lora=[files[0]]) as opened:
            assert opened.adapters == {"one": 1.0}
            banned = opened.tokenizer.eog
            found.append([t.id for t in opened.generate(prompt, limit=20, temp=0,
                                                        ignore_eos=True)])
            opened.scale_adapter("one", np.float32(0))
            base = [t.id for t in opened.generate(prompt, limit=20, temp=0, ignore_eos=True)]
            with pytest.raises(LlamaGraphError, match="no adapter 'two'; there are one"):
                opened.scale_adapter("two", 1)
            with pytest.raises(LlamaGraphError, match="one: the scale of an adapter is a number"):
                opened.scale_adapter("one", float("nan"))
    assert all(tokens == found[0] != base for tokens in found)
    assert found[0] == likeliest(merged(model, {files[0]: 1.0}), prompt, found[0], banned)
    assert base == likeliest(PlainModel(model), prompt, base, banned)


# ---- How it is planned ----


def test_only_adapted_matrices_leave_their_fused_launches(tmp_path):
    model = tiny_model(tmp_path / "m.gguf", quant="Q4_K", n_layer=3)
    adapter = write_adapter(tmp_path / "a.gguf", model, ["blk.1.attn_v.weight"])
    with GGUFFile(model) as file, Adapters([adapter], file) as adapters:
        planner = Planner(file, target_named("sm_90a"), adapters=adapters)
        base, adapted = (planner.plan(key).launches for key in (
            StepKey(), adapters.key(StepKey())))
    rest = [[(x.kernel, x.label) for x in found if not x.label.startswith("blk.1.attn")]
            for found in (base, adapted)]
    assert rest[0] == rest[1]
    (a, b) = (x for x in adapted if ".lora_" in x.label)
    assert [x.label for x in (a, b)] == ["blk.1.attn_v.lora_a", "blk.1.attn_v.lora_b"]
    assert [x.kernel.name for x in (a, b)] == ["gemv_norm", "lora_add"]
    assert b.reason == "adapter a, alpha / rank = 2" and len(adapted) == len(base) + 2


def test_labels_are_distinct_with_several_adapters(several):
    model, files = several
    runner = runner_of(model, files)
    for key in (StepKey(), StepKey(8)):
        labels = [label for _, label in launches(runner, runner.adapters.key(key))
                  if ".lora" in label]
        assert len(labels) == len(set(labels)) == 2 * (14 + 6 + 6 + 1)


def test_adapters_count_in_the_memory_check(several):
    model, files = several
    with GGUFFile(model) as file:
        base = Planner(file, target_named("numpy"))
        with Adapters(files, file) as adapters:
            more = Planner(file, target_named("numpy"), adapters=adapters)
    stored = sum(x.shape[0] * x.shape[1] for x in adapters.stored.values())
    assert more.weights_bytes - base.weights_bytes > stored
    needed = 0
    for sources in ([], files):
        with pytest.raises(MemoryLimitError, match="of memory are needed") as caught:
            runner_of(model, sources, available=lambda: 1000)
        gigabytes = float(str(caught.value).split(": ")[1].split()[0])
        assert gigabytes >= needed
        needed = gigabytes


def test_every_set_has_room_in_the_scratch(several):
    model, files = several
    runner = runner_of(model, [(f, 0) for f in files])
    for i in range(8):
        for j, name in enumerate(("one", "two", "three")):
            rescale(runner, name, i >> j & 1)
        runner.prefill(some_tokens(200))


# ---- What is refused ----


def refusal(model, path, data):
    path.write_bytes(data)
    with GGUFFile(model) as file, pytest.raises(FormatError) as caught:
        Adapters([path], file)
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and line.isprintable()
    return line.removeprefix(f"{path}: ")


def zeros(name, *shape):
    return Tensor(name, shape, "F32", bytes(4 * int(np.prod(shape))))


def test_other_files_are_refused(several, tmp_path):
    model, _ = several
    path, pair = tmp_path / "a.gguf", pairs_of(model, ["blk.0.attn_q.weight"], 4)
    cases = [
        ({}, "general.type is 'model', not 'adapter'; a model is given with -m"),
        (keys(**{"general.type": "model"}), "general.type is 'model', not 'adapter'; "),
        (keys(**{"adapter.type": "control"}), "adapter.type is 'control'; LoRA adapters alone"),
        ({"general.type": "adapter"}, "adapter.type is missing"),
        (keys(arch="qwen2"), "general.architecture is 'qwen2', that of "),
        (keys(alpha="many"), "adapter.lora.alpha is 'many', not a finite number"),
        (keys(alpha=float("inf")), "adapter.lora.alpha is inf, not a finite number"),
        (keys(**{"adapter.alora.invocation_tokens": np.array([1], np.uint32)}),
         "adapter.alora.invocation_tokens is there: an activated LoRA"),
    ]
    for pairs, message in cases:
        assert refusal(model, path, gguf_bytes(pairs, pair)).startswith(message)
    assert refusal(model, path, model.read_bytes()).startswith("general.type is 'model'")


def test_wrong_tensors_are_refused(several, tmp_path):
    model, _ = several
    path, q = tmp_path / "a.gguf", "blk.0.attn_q.weight"
    a, b = zeros(f"{q}.lora_a", 4, 64), zeros(f"{q}.lora_b", 64, 4)
    cases = [
        ([], "there is no tensor that ends in .lora_a; convert"),
        ([a], f"tensor {q}.lora_b is missing, half of a pair"),
        ([b], f"tensor {q}.lora_a is missing, half of a pair"),
        ([a, b, zeros(q, 64, 64)], f"tensor {q} ends in neither .lora_a nor .lora_b"),
        ([zeros("blk.9.attn_q.weight.lora_a", 4, 64), zeros("blk.9.attn_q.weight.lora_b", 64, 4)],
         "tensor blk.9.attn_q.weight.lora_a changes blk.9.attn_q.weight, which "),
        ([zeros(f"{q}.lora_a", 4, 96), b],
         f"tensors {q}.lora_a and .lora_b are 4 x 96 and 64 x 4, which does not fit 64 x 64 in "),
        ([zeros(f"{q}.lora_a", 5, 64), b], f"tensors {q}.lora_a and .lora_b are 5 x 64 and 64 x 4"),
        ([zeros(f"{q}.lora_a", 64, 4), zeros(f"{q}.lora_b", 4, 64)],
         f"tensors {q}.lora_a and .lora_b are 64 x 4 and 4 x 64, which does not fit"),
        ([zeros(f"{q}.lora_a", 2, 4, 64), b], f"tensor {q}.lora_a is 2 x 4 x 64, not a matrix"),
        ([zeros(f"{EMBEDDING}.lora_a", 4, 64), zeros(f"{EMBEDDING}.lora_b", N_VOCAB, 4)],
         f"tensors {EMBEDDING}.lora_a and .lora_b are 4 x 64 and {N_VOCAB} x 4, which does not"),
        ([zeros("blk.0.attn_norm.weight.lora_a", 4, 64),
          zeros("blk.0.attn_norm.weight.lora_b", 64, 4)],
         "tensors blk.0.attn_norm.weight.lora_a and .lora_b are 4 x 64 and 64 x 4, which does not"),
        ([zeros("output.weight.lora_a", 4, 64), zeros("output.weight.lora_b", N_VOCAB, 4)],
         "tensor output.weight.lora_a changes output.weight, which "),
    ]
    for tensors, message in cases:
        assert refusal(model, path, gguf_bytes(keys(), tensors)).startswith(message)


def test_norms_are_left_out_and_said(several, tmp_path):
    model = several[0]
    pair = pairs_of(model, LAYER[:1], 4)
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes(keys(), [*pair, zeros("blk.0.attn_norm.weight", 64)]))
    said: list[str] = []
    with GGUFFile(model) as file, Adapters([path], file, said.append) as adapters:
        assert len(adapters.stored) == 2 * 2
    assert said == [f"{path}: blk.0.attn_norm.weight is left out: norms are not adapted"]


def test_cut_files_are_refused(several, tmp_path):
    model, files = several
    data = files[0].read_bytes()
    for n in range(0, len(data) - 1, len(data) // 40):
        refusal(model, tmp_path / "cut.gguf", data[:n])


# ---- The command line ----


def run(model, *arguments, command="run", **environment):
    base = ["run", "--device", "cpu", "-m", str(model), "hello", "-n", "4", "--json", "--temp", "0",
            "--ignore-eos"] if command == "run" else [command, "-m", str(model), "--json"]
    return CliRunner().invoke(cli, [*base, *map(str, arguments)], env=environment)


def test_options_take_files_lists_and_scales(several):
    model, (one, two, three) = several
    found = {}
    for arguments in ((), ("--lora", one), ("--lora-scaled", f"{one}:0"),
                      ("--lora", f"{one},{two}", "--lora-scaled", f"{three}:0.5"),
                      ("--lora", one, "--lora", two, "--lora-scaled", f"{three}:5e-1")):
        result = run(model, *arguments)
        assert result.exit_code == 0, result.exception
        found[arguments] = json.loads(result.stdout)
    base, single, off, lists, repeated = found.values()
    assert base["tokens"] == off["tokens"] != single["tokens"]
    assert lists["tokens"] == repeated["tokens"]
    assert lists["settings"]["lora"] == {"one": 1.0, "two": 1.0, "three": 0.5}
    environment = run(model, LLAMAGRAPH_ARG_LORA=str(one), LLAMAGRAPH_ARG_LORA_SCALED=f"{two}:2")
    assert json.loads(environment.stdout)["settings"]["lora"] == {"one": 1.0, "two": 2.0}


def test_lists_are_read_as_csv():
    assert read_files(('a.gguf,"b,c.gguf"', "d.gguf,")) == [
        ("a.gguf", 1.0), ("b,c.gguf", 1.0), ("d.gguf", 1.0)]
    assert read_scaled(("c:/a.gguf:0.5,b.gguf:-2",)) == [("c:/a.gguf", 0.5), ("b.gguf", -2.0)]


@pytest.mark.parametrize("text", ["a.gguf", "a.gguf:", "a.gguf:x", ":1", "a.gguf:nan"])
def test_a_scale_must_be_a_number(several, text):
    result = run(several[0], "--lora-scaled", text)
    assert result.exit_code == 2 and f"{text!r} is not FILE:SCALE" in result.stderr


def test_a_missing_file_is_one_line(several, tmp_path):
    path = tmp_path / "none.gguf"
    line = str(run(several[0], "--lora", path).exception)
    assert line == f"{path}: cannot be read: No such file or directory"


def test_inspect_graph_shows_the_adapters_launches(several):
    model, files = several
    data = json.loads(run(model, "--lora", files[0], "--target", "numpy",
                          command="inspect-graph").stdout)
    labels = [node["label"] for node in data["nodes"]]
    assert data["totals"]["adapters"] == ["one"]
    assert {"blk.1.ffn_down.lora_a", "blk.1.ffn_down.lora_b"} <= set(labels)
    node = data["nodes"][labels.index("blk.1.ffn_down.lora_a")]
    assert node["args"]["weight"] == "one:blk.1.ffn_down.weight.lora_a"
    checked = run(model, "--lora", files[0], "--device", "cpu", "--steps", 2,
                  command="inspect-graph")
    assert json.loads(checked.stdout)["totals"]["driver"]["nodes"] == len(labels)
