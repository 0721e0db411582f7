"""Who may import whom: the arrows of the design, transitively and never upward."""

import ast
import pathlib
import sys

import llamagraph

ROOT = pathlib.Path(llamagraph.__file__).parent
ARROWS = {
    "cli": {"files", "sequence", "conversation", "chat", "bench", "bench_anatomy", "bench_page",
            "bench_report", "inspection_driver", "inspection_page", "inspection_diff",
            "inspection_registers", "model"},
    "conversation": {"files", "model", "sequence", "text"},
    "chat": {"model", "text"},
    "bench": {"bench_facts", "bench_result", "model"},
    "bench_anatomy": {"bench", "bench_compare"},
    "bench_page": {"bench_compare", "html_page"},
    "bench_report": {"bench_result"},
    "bench_compare": {"bench_result"},
    "bench_facts": {"model"},
    "bench_result": {"planner"},
    "inspection_driver": {"inspection"},
    "inspection_registers": {"inspection"},
    "inspection_page": {"html_page", "inspection"},
    "inspection_diff": {"inspection"},
    "inspection": {"model"},
    "model": {"generation", "promptcache"},
    "generation": {"runner", "timings"},
    "promptcache": {"files", "runner"},
    "timings": {"text"},
    "runner": {"sequence", "loading", "text", "sampling_host", "execute"},
    "loading": {"planner", "devices"},
    "planner": {"adapters", "models", "kvcache"},
    "adapters": {"program", "gguf"},
    "models": {"kernels"},
    "sampling_host": {"sampling"},
    "sampling": {"kernels"},
    "sequence": {"kvcache", "devices"},
    "kvcache": {"kernels"},
    "kernels": {"program", "gguf.quants"},
    "devices": {"program", "gguf.quants", "gguf.hub"},
    "execute": {"program"},
    "gguf": {"gguf.quants"},
    "files": set(),
    "html_page": set(),
    "text": set(),
    "program": set(),
    "gguf.quants": set(),
    "gguf.hub": set(),
}


def below(room: str) -> set[str]:
    direct = ARROWS[room]
    return direct.union(*(below(r) for r in direct))


def room_of(module: str) -> str | None:
    """The room of `llamagraph.<module>`; the package itself and errors may be used by all."""
    parts = module.split(".")
    if parts[:2] in (["gguf", "quants"], ["gguf", "hub"]):
        return ".".join(parts[:2])
    return parts[0] if parts[0] in ARROWS else None


def imports(path: pathlib.Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ("llamagraph", *path.relative_to(ROOT).parent.parts)
                base = ".".join([*package[: len(package) - node.level + 1], *base.split(".")])
            yield base.rstrip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        yield path, ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_nothing_imports_upward():
    wrong = []
    for path, module in modules():
        room = room_of(module)
        if room is None:
            continue
        for name in imports(path):
            if name.startswith("llamagraph."):
                other = room_of(name.removeprefix("llamagraph."))
                if other not in {None, room, *below(room)} and not (
                    room.startswith("gguf") and other.startswith("gguf")
                ):
                    wrong.append(f"{module} imports {name}")
    assert not wrong


def test_program_is_stdlib_only_and_the_driver_has_one_home():
    for path, module in modules():
        for name in imports(path):
            top = name.split(".")[0]
            if module.startswith("program"):
                assert top == "llamagraph" or top in sys.stdlib_module_names, f"{module}: {name}"
            if name.startswith(("cuda.bindings", "cuda.pathfinder")):
                assert module == "devices.cuda.compiler" or module.startswith(
                    "devices.cuda.driver"), module
            if module.startswith("models"):
                assert top != "gguf" and not name.startswith("llamagraph.devices")


def test_files_and_functions_stay_short():
    for path, module in modules():
        lines = path.read_text().splitlines()
        tree = ast.parse("\n".join(lines))
        reason = "300 lines" in (ast.get_docstring(tree) or "")
        assert len(lines) <= 300 or reason, f"{module}: {len(lines)} lines"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 50, f"{module}.{node.name}"
