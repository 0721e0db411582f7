"""What inspecting shows of a step: its numbers, what updates it, how two differ, and the page."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from tiny import tiny_model

from llamagraph.cli import cli
from llamagraph.cli.inspect_graph import read_setting
from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import LlamaGraphError
from llamagraph.gguf.reader import GGUFFile
from llamagraph.gguf.synthetic import SyntheticFile
from llamagraph.inspection import Setting, folded, inspect
from llamagraph.inspection_diff import compare
from llamagraph.kernels.attention import LONG_KV, attention_vars
from llamagraph.planner import Planner
from llamagraph.program.launch import Launch, StepKey, Work
from llamagraph.program.target import target_named
from llamagraph.runner import Runner

NODE_KEYS = {"label", "kernel", "variant", "reason", "grid", "block", "shared", "args",
             "bytes_read", "bytes_written", "dependencies", "updated_by", "stable", "constants",
             "pdl", "part", "l2_window", "priority"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", n_ctx=1024, n_layer=3)


@pytest.fixture(scope="module")
def planner(path):
    return Planner(GGUFFile(path), target_named("numpy"))


def gpu(spec="1b:q4_k_m", n_ctx=None):
    return Planner(SyntheticFile(spec), target_named("sm_90a"), n_ctx)


def test_products_of_one_input_are_side_by_side(planner):
    found = inspect(planner, Setting())
    nodes = {n.label: n for n in found.nodes if n.layer is not None}
    q, k, v = (nodes[f"blk.1.attn_{x}"] for x in "qkv")
    assert q.dependencies == k.dependencies == v.dependencies
    assert [found.nodes[j].label for j in q.dependencies] == ["blk.1.attn_norm"]
    assert found.totals["width"] == 3 < found.totals["depth"] < len(found.nodes)
    assert found.totals["edges"] == len(found.edges) == 3 * 15 + 3


def test_the_plan_is_the_runners(path, planner):
    runner = Runner(GGUFFile(path), CpuDevice())
    executor = runner.executors[StepKey()]
    found, vars = inspect(planner, Setting()), attention_vars(planner.target, 1)
    ran = [x.resolve(vars, lambda b: b.name) for x in executor.program.launches]
    assert [(n.label, tuple(n.args.values()), n.grid) for n in found.nodes] == [
        (x.label, c.args, c.grid) for x, c in zip(executor.program.launches, ran, strict=True)]
    assert found.totals["bytes_read"] == sum(
        x.traffic(Work(1, 1)).read for x in executor.program.launches)
    assert found.totals["scratch_bytes"] == executor.program.scratch_bytes


def test_no_weight_is_read(monkeypatch, path):
    class Shapes(GGUFFile):
        def data(self, name):
            raise AssertionError(name)

    assert inspect(Planner(Shapes(path), target_named("sm_90a")), Setting()).nodes
    assert sum(t.n_bytes for t in SyntheticFile("70b:f16").tensors.values()) > 1e11
    assert inspect(gpu("70b:f16"), Setting()).totals["weights_bytes"] > 1e11


def test_a_floor_is_bytes_over_bandwidth(planner):
    assert "floor_ms" not in inspect(planner, Setting()).totals
    totals = inspect(planner, Setting(rows=4, depth=9), bandwidth=1e9).totals
    n_bytes = totals["bytes_read"] + totals["bytes_written"]
    assert totals["bytes_per_token"] == n_bytes / 4
    assert totals["floor_ms"] == pytest.approx(n_bytes / 1e6)
    assert totals["row_bucket"] == 8 and totals["kv_bytes"] == planner.kv.bytes_at(13)


def test_steady_decode_updates_nothing_and_a_boundary_names_the_attention():
    planner = gpu()
    assert inspect(planner, Setting(depth=600), 400).updates.node_updates == 0
    updates = inspect(planner, Setting(depth=100), 600).updates
    assert updates.at == {129: 16, 257: 16, 513: 16} and updates.node_updates == 48
    assert updates.labels == tuple(f"blk.{i}.attn" for i in range(16))
    assert not updates.programs


def test_many_steps_resolve_what_changes_alone(monkeypatch):
    resolved, resolve = [], Launch.resolve
    monkeypatch.setattr(Launch, "resolve", lambda self, *a: (resolved.append(self.label),
                                                            resolve(self, *a))[1])
    updates = inspect(gpu(n_ctx=1 << 17), Setting(depth=8192), 20_000).updates
    assert updates.steps == 20_000 and not updates.programs and len(resolved) < 400


def test_a_deeper_context_takes_another_program():
    updates = inspect(gpu(), Setting(depth=LONG_KV - 12), 20).updates
    assert updates.programs == (LONG_KV,)


def test_updates_are_what_an_executor_sends(path, planner):
    runner = Runner(GGUFFile(path), CpuDevice(), "capture")
    runner.n_past, executor = 200, runner.executors[StepKey()]
    runner.n_past = 0
    sent = {}
    for kv_len in range(201, 301):
        vars = attention_vars(runner.device.target, kv_len)
        if changed := executor._changed(vars):
            sent[kv_len] = len(changed)
    assert inspect(planner, Setting(depth=200), 99).updates.at == sent == {257: 3}


@pytest.mark.parametrize("setting, steps, message", [
    (Setting(depth=1024), 0, "1025 positions do not fit"),
    (Setting(depth=1000), 24, "1025 positions"),
    (Setting(rows=2049), 0, "1 to 2048 rows"),
])
def test_what_does_not_fit_is_said(planner, setting, steps, message):
    with pytest.raises(LlamaGraphError, match=message):
        inspect(planner, setting, steps)


def test_modes_have_their_edges_and_graphs(planner):
    stream, capture, partial = (
        inspect(planner, Setting(mode=m)) for m in ("stream", "capture", "partial"))
    assert stream.edges == capture.edges == [(i, i + 1) for i in range(len(stream.nodes) - 1)]
    assert capture.totals["width"] == 1 and capture.totals["graphs"] == 1
    assert stream.totals["graphs"] == 0
    assert [n.label for n in partial.nodes if n.part is None] == [
        f"blk.{i}.attn" for i in range(3)]
    assert partial.totals["graphs"] == 4


def test_a_loop_is_the_body_of_a_node(path, planner):
    step, loop = (inspect(planner, Setting(mode=m)) for m in ("build", "loop"))
    assert [n.label for n in loop.nodes] == [*(n.label for n in step.nodes), "loop"]
    assert loop.edges[:-1] == step.edges and loop.edges[-1] == (
        len(step.nodes) - 1, len(step.nodes))
    assert loop.nodes[-1].kernel == "loop_control" and loop.key.repeats
    where = f"io+{planner.io['condition'].start}"
    assert loop.totals["loop"] == {"node": "WHILE", "body": len(loop.nodes), "handle": where}
    for setting in (Setting(rows=2, mode="loop"), Setting(sampler="host", mode="loop")):
        assert "loop" not in inspect(planner, setting).totals
    text = invoke("-m", path, "--graph-mode", "loop").stdout
    assert "the body of a WHILE node" in text and "loop_control" in text
    assert "cluster_loop" in invoke("-m", path, "--graph-mode", "loop", "--dot").stdout


def test_equal_layers_fold():
    groups = folded(inspect(gpu("8b:q4_k_m"), Setting()).nodes)
    layers = [g.layers for g in groups if g.layers]
    assert sorted(i for run in layers for i in run) == list(range(32))
    assert layers[0][:4] == (0, 1, 2, 3) and len(layers) == 2


def test_layers_that_are_shown_as_one_have_the_same_in_every_column(planner):
    nodes = inspect(planner, Setting()).nodes
    other = [replace(n, priority=1 - n.priority) if n.layer == 1 else n for n in nodes]
    layers = [[g.layers for g in folded(x) if g.layers] for x in (nodes, other)]
    assert layers == [[(0, 1, 2)], [(0, 2), (1,)]]


# --- differences -------------------------------------------------------------------------------


def test_a_depth_differs_in_grids_alone():
    planner = gpu()
    d = compare(inspect(planner, Setting(depth=100)), inspect(planner, Setting(depth=300)))
    assert d.same_program and d.topology_equal and not d.only_a and not d.only_b
    assert d.sent == tuple(d.changed) == tuple(f"blk.{i}.attn" for i in range(16))
    assert set(d.changed["blk.0.attn"]) == {"grid"} and d.update.startswith("16 nodes")


def test_row_buckets_of_equal_topology_take_a_whole_update(planner):
    d = compare(inspect(planner, Setting(rows=8)), inspect(planner, Setting(rows=32)))
    assert d.topology_equal and not d.same_program and "whole update" in d.update
    assert "scratch+" in d.changed["blk.0.attn_q"]["out"][0]
    same = compare(inspect(planner, Setting(rows=2)), inspect(planner, Setting(rows=8)))
    assert same.same_program and not same.changed and same.update == "nothing"


def test_another_topology_is_another_executable(planner):
    d = compare(inspect(planner, Setting()), inspect(planner, Setting(mode="capture")))
    assert not d.topology_equal and not d.changed and "another executable" in d.update
    few, chain = gpu(), gpu()
    d = compare(inspect(few, Setting(rows=2)), inspect(chain, Setting()))
    assert "blk.0.attn_norm" in d.only_a and "blk.0.ffn_norm" in d.only_a and not d.sent


def test_launches_outside_of_graphs_are_no_nodes_of_them():
    planner, depths = gpu(), (100, 300)
    stream, partial, build = (
        compare(*(inspect(planner, Setting(depth=n, mode=mode)) for n in depths))
        for mode in ("stream", "partial", "build"))
    assert stream.update == partial.update == "16 launches get new arguments"
    assert stream.changed == partial.changed == build.changed
    assert not stream.sent and not partial.sent and len(build.sent) == 16
    rows = (inspect(planner, Setting(rows=n, mode="stream")) for n in (8, 32))
    assert compare(*rows).update == "other launches; there is no graph"


def test_a_loop_is_never_updated_whole(planner):
    greedy, chain = (inspect(planner, Setting(mode="loop", sampler=s)) for s in ("greedy", "chain"))
    d = compare(greedy, chain)
    assert d.topology_equal and set(d.changed) == {"choose"} and not d.sent
    assert d.update == "another executable: a loop is made anew"


def test_words_of_a_setting():
    assert read_setting("rows=8,depth=9,mode=capture", Setting(sampler="chain")) == Setting(
        8, 9, "capture", "chain")


# --- the command -------------------------------------------------------------------------------


def invoke(*arguments):
    return CliRunner().invoke(cli, ["inspect-graph", *map(str, arguments)])


def test_json_has_its_keys(path):
    report = json.loads(invoke("-m", path, "--json", "--steps", "400").stdout)
    assert set(report) == {"nodes", "edges", "totals", "updates"}
    assert set(report["updates"]) == {"steps", "node_updates", "labels"}
    assert all(set(node) == NODE_KEYS for node in report["nodes"])
    assert report["updates"]["labels"] == [f"blk.{i}.attn" for i in range(3)]
    assert "token_embd.weight" in report["nodes"][0]["args"].values()
    assert report["totals"]["target"] == "sm_90a"
    assert len(report["edges"]) == report["totals"]["edges"]


def test_the_table_folds_layers_and_says_totals(path):
    text = invoke("-m", path, "--target", "numpy", "--steps", "300").stdout
    assert "blk.0-2: 3 x" in text and "width 3" in text and "n_attn_blocks" in text
    assert "300 steps: 3 node updates" in text and "at KV length 257: 3 nodes" in text


def test_another_architectures_choices_keep_the_targets_counts():
    def grids(*arguments):
        result = invoke("--synthetic", "135m:q8_0", "--json", *arguments)
        report = json.loads(result.stdout)
        return report["totals"]["target"], [n["pdl"] for n in report["nodes"]]

    target, pdl = grids("--target", "sm_90a", "--arch-tuning", "sm_80")
    assert target == "sm_80" and not any(pdl)
    assert all(grids("--target", "sm_90a")[1])
    assert all(grids("--target", "numpy", "--arch-tuning", "sm_90a")[1])


def test_dot_and_diff(path):
    text = invoke("-m", path, "--dot").stdout
    assert text.startswith("digraph") and text.count("subgraph") == 3 and "n0 -> n1" in text
    text = invoke("-m", path, "--diff", "depth=100", "depth=300").stdout
    assert "(3 layers)" in text and "topology: equal" in text
    report = json.loads(invoke("-m", path, "--diff", "rows=1", "rows=8", "--json").stdout)
    assert report["a"]["rows"] == 1 and report["topology_equal"] is False


@pytest.mark.parametrize("arguments, message", [
    (["--synthetic", "8b:q4_k_m", "-m", "x.gguf"], "give one"),
    (["--synthetic", "8b:q4_k_m", "--diff", "rows=1", "size=2"], "size=2"),
    (["--synthetic", "8b:q4_k_m", "--device", "cuda", "--target", "numpy"], "leave --target out"),
    (["--synthetic", "8b:q4_k_m", "--target", "sm_1"], "unknown target"),
    (["--synthetic", "8b:q4_k_m", "--target", "numpy", "--registers"], "a GPU's target"),
    (["--synthetic", "8b:q4_k_m", "--steps", "200000"], "do not fit the context"),
    (["--synthetic", "8b:q4_k_m", "--bandwidth", "nan"], "'nan' is no finite number"),
    (["--synthetic", "8b:q4_k_m", "--target", "sm_75", "--arch-tuning", "sm_90a"], "sm_75 may not"),
    (["--synthetic", "8b:q4_k_m", "--arch-tuning", "numpy"], "sm_90a may not have its kernels"),
])
def test_mistakes_are_explained(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code and message in result.stderr + str(result.exception)
