"""Prompt cache files: what they bring back, and what is refused with which reason."""

import json
import re
import struct

import numpy as np
import pytest
from adapter_files import write_adapter
from click.testing import CliRunner
from tiny import tiny_model

import llamagraph
from llamagraph.cli import cli
from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import LlamaGraphError
from llamagraph.gguf.reader import GGUFFile
from llamagraph.promptcache import START

PROMPT = [i * 7 % 250 for i in range(2000)]


def opened(path, **options):
    return llamagraph.open(path, device=CpuDevice(), **options)


def answer(model, prompt, **options):
    found = model.generate(prompt, limit=12, temp=0, ignore_eos=True, **options)
    return [id for id, _ in found], found.timings


@pytest.mark.parametrize("arch, quant, n_layer, types", [
    ("llama", "Q4_K", 2, ("q8_0", "q4_0")), ("gemma3", "F32", 6, ("bf16", None))])
def test_the_second_run_reads_one_token(tmp_path, arch, quant, n_layer, types):
    path, file = tmp_path / "m.gguf", tmp_path / "p"
    tiny_model(path, arch, quant, n_ctx=4096, n_layer=n_layer)
    kv = {"type_k": types[0], "type_v": types[1]}
    with opened(path, n_ctx=2500, **kv) as model:
        first, timings = answer(model, PROMPT, prompt_read=lambda: model.save_state(file))
        assert timings.n_prompt == 2000
    for n_ctx in (2500, 4096):
        with opened(path, n_ctx=n_ctx, **kv) as model:
            assert model.load_state(file) == 2000
            again, timings = answer(model, PROMPT)
            assert again == first and (timings.n_prompt, timings.n_reused) == (1, 1999)
            assert answer(model, PROMPT[:-5])[1].n_prompt == 1
    assert not list(tmp_path.glob(".p.*"))


def test_what_was_written_is_what_is_read(tmp_path):
    path, file = tiny_model(tmp_path / "m.gguf", "qwen3"), tmp_path / "p"
    with opened(path) as one, opened(path) as two:
        one.runner.prefill([1, 2, 3, 4])
        one.save_state(file)
        assert two.load_state(file) == 4 and two.runner.sequence == [1, 2, 3, 4]
        assert np.array_equal(one.runner.logits([5]), two.runner.logits([5]))


@pytest.fixture
def saved(tmp_path):
    path, file = tiny_model(tmp_path / "m.gguf", n_ctx=512), tmp_path / "p"
    with opened(path) as model:
        model.runner.prefill(PROMPT[:300])
        model.save_state(file)
    return path, file


def refused(path, file, reason, n_ctx=None, overrides=None):
    with opened(path, n_ctx=n_ctx, overrides=overrides) as model:
        model.runner.prefill([1, 2])
        with pytest.raises(LlamaGraphError, match=reason) as raised:
            model.load_state(file)
        assert "\n" not in str(raised.value) and str(raised.value).startswith(str(file))
        assert model.runner.sequence == [1, 2]


def test_an_edited_model_is_refused(saved, tmp_path):
    path, file = saved
    refused(tiny_model(tmp_path / "other.gguf", n_ctx=512, seed=3), file, "another model")
    with GGUFFile(path) as model:
        at = model.tensors["blk.1.ffn_down.weight"].offset
    data = bytearray(path.read_bytes())
    data[at + 1000] ^= 1  # in no sample
    path.write_bytes(data)
    refused(path, file, "before its file was changed or copied; delete it")


def test_other_options_are_refused(saved):
    refused(*saved, "other model options", overrides={"llama.rope.scaling.factor": 2.0})
    refused(*saved, "holds 300 tokens, the context 256; raise -c", n_ctx=256)


def test_other_adapters_are_refused(tmp_path):
    path, file = tiny_model(tmp_path / "m.gguf"), tmp_path / "p"
    lora = write_adapter(tmp_path / "a.gguf", path, ["attn_k.weight"])
    with llamagraph.open(path, device=CpuDevice(), lora=[(lora, 0.5)]) as model:
        model.runner.prefill([1, 2, 3])
        model.save_state(file)
        assert model.load_state(file) == 3
        model.scale_adapter("a", 0.25)
        with pytest.raises(LlamaGraphError, match="other LoRA adapters, or with other scales"):
            model.load_state(file)
    refused(path, file, "other LoRA adapters")


def edit(change):
    def damage(data):
        length = START.unpack(data[: START.size])[2]
        header = data[START.size : START.size + length]
        new = change(header)
        return data[: START.size - 4] + struct.pack("<I", len(new)) + new + data[
            START.size + length :]
    return damage


@pytest.mark.parametrize("damage, reason", [
    (lambda d: d[:-1], "is cut off"), (lambda d: d[:40], "is cut off"),
    (lambda d: d[:5], "is no prompt cache"), (lambda d: b"GGUF" + d[4:], "is no prompt cache"),
    (lambda d: d[:8] + b"\7" + d[9:], "has version 7, this program writes 1"),
    (lambda d: d[:-50] + bytes([d[-50] ^ 1]) + d[-49:], "is damaged"),
    (lambda d: d + b"x", "is cut off or damaged"),
    (edit(lambda h: h.replace(b'"F32/F32"', b'"F16/F32"')), "holds a KV cache in F16/F32, here it"),
    (edit(lambda h: b"[]"), "is cut off or damaged"),
    (edit(lambda h: h.replace(b'"held": 0', b'"held": 9')), "is damaged"),
])
def test_what_is_damaged_is_refused(saved, damage, reason):
    path, file = saved
    file.write_bytes(damage(file.read_bytes()))
    refused(path, file, reason)


def test_a_file_that_cannot_be_written(saved, tmp_path):
    with opened(saved[0]) as model:
        model.runner.prefill([1])
        with pytest.raises(LlamaGraphError, match="cannot be written: No such file"):
            model.save_state(tmp_path / "none" / "p")
        with pytest.raises(LlamaGraphError, match="cannot be read"):
            model.load_state(tmp_path / "none" / "p")


def run(path, *arguments):
    return CliRunner().invoke(cli, ["run", "-m", str(path), "--device", "cpu", "-no-cnv", "--temp",
                                    "0", "--ignore-eos", "-n", "8", *arguments])


def test_the_command_line(tmp_path):
    path, file = tiny_model(tmp_path / "m.gguf", n_ctx=64), tmp_path / "p"
    cached = ("--prompt-cache", str(file))
    first = run(path, *cached, "hello world")
    written = file.read_bytes()
    second = run(path, *cached, "hello world")
    assert first.stdout == second.stdout and first.exit_code == second.exit_code == 0
    assert "prompt: 1 tokens and" in second.stderr and file.read_bytes() == written
    run(path, *cached, "--prompt-cache-ro", "other")
    assert file.read_bytes() == written
    assert run(path, *cached, "--prompt-cache-all", "hello world").exit_code == 0
    assert len(file.read_bytes()) > len(written)
    shifted = run(path, *cached, "--prompt-cache-all", "--context-shift", "-n", "150", "hello")
    assert shifted.exit_code == 0 and "the context has shifted" in shifted.stderr
    assert run(path, "--prompt-cache-ro", "hello").exit_code == 2
    absent = run(path, "--prompt-cache", str(tmp_path / "none"), "--prompt-cache-ro", "hello")
    assert absent.exit_code == 0 and "none: is not there" in absent.stderr
    other = run(tiny_model(tmp_path / "o.gguf", n_ctx=64, seed=5), *cached, "hello")
    assert other.exit_code == 1 and "another model" in str(other.exception)


@pytest.mark.parametrize("all_of_it", [(), ("--prompt-cache-all",)])
def test_a_prompt_is_kept_without_an_answer(tmp_path, all_of_it):
    path, file = tiny_model(tmp_path / "m.gguf", n_ctx=64), tmp_path / "p"
    cached = ("--prompt-cache", str(file), *all_of_it, "hello world")
    kept = run(path, *cached, "-n", "0")
    assert kept.exit_code == 0 and kept.stdout.strip() == "" and file.exists()
    assert "generation: 0 tokens" in kept.stderr and "prompt: 0 tokens" not in kept.stderr
    again = run(path, *cached, "-n", "0")
    assert re.search(r"has (\d+) of the prompt's \1 tokens", again.stderr)
    assert "prompt: 1 tokens and" in run(path, *cached).stderr


def test_what_cannot_be_written_is_said_before_a_prompt_is_read(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", n_ctx=64)
    for name in ("none/p", "a" * 300):
        refused = run(path, "--prompt-cache", str(tmp_path / name), "hello")
        assert isinstance(refused.exception, LlamaGraphError) and refused.stdout == ""
        assert "cannot be written" in str(refused.exception) and "anew" not in refused.stderr


def test_an_answer_is_not_lost_with_its_cache(tmp_path):
    path, file = tiny_model(tmp_path / "m.gguf", n_ctx=64), tmp_path / "p"
    run(path, "--prompt-cache", str(file), "hello")
    long = file.rename(tmp_path / ("p" * 255))  # what is written beside it would have a longer name
    done = run(path, "--prompt-cache", str(long), "--prompt-cache-all", "--json", "hello")
    assert "cannot be written" in str(done.exception)
    assert len(json.loads(done.stdout)["tokens"]) == 8
