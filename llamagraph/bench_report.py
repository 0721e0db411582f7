"""Results as text, in llama-bench's formats: md, csv, json, jsonl and sql.

Its fields come first, in its order and with its types; those that mean nothing here have its own
defaults. Ours follow. Knows no device; text is returned, not printed.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple

from llamagraph.bench_result import Result

# llama-bench's fields (llama.cpp 0.5.0, tools/llama-bench) with the values that it has by default;
# a field's type is that of its default.
LLAMA_BENCH: Mapping[str, str | bool | int | float] = MappingProxyType(
    {
        "build_commit": "", "build_number": 0, "cpu_info": "", "gpu_info": "", "backends": "",
        "model_filename": "", "model_type": "", "model_size": 0, "model_n_params": 0,
        "n_batch": 2048, "n_ubatch": 512, "n_threads": 1, "cpu_mask": "0x0", "cpu_strict": False,
        "poll": 50, "type_k": "f16", "type_v": "f16", "n_gpu_layers": -1, "n_cpu_moe": 0,
        "split_mode": "layer", "main_gpu": 0, "no_kv_offload": False, "flash_attn": -1,
        "devices": "auto", "tensor_split": "0.00", "tensor_buft_overrides": "none",
        "load_mode": "auto", "lazy_mode": "auto", "embeddings": False, "no_op_offload": 0,
        "no_host": False, "repack": True, "fit_target": 0, "fit_min_ctx": 4096, "n_prompt": 0,
        "n_gen": 0, "n_depth": 0, "test_time": "", "avg_ns": 0, "stddev_ns": 0, "avg_ts": 0.0,
        "stddev_ts": 0.0,
    }
)
SAMPLES = ("samples_ns", "samples_ts")  # in json and jsonl alone
SQL_TYPES = MappingProxyType({str: "TEXT", bool: "INTEGER", int: "INTEGER", float: "REAL"})


def own_fields(kind: type = Result) -> list[tuple[str, type]]:
    """Ours, with their types."""
    return [(f.name, f.type) for f in fields(kind)  # type: ignore[misc]
            if f.name not in LLAMA_BENCH and f.name not in SAMPLES]


def record(result: Any) -> dict[str, Any]:
    """All fields in the order of columns, without the samples."""
    theirs = {name: getattr(result, name, default) for name, default in LLAMA_BENCH.items()}
    return theirs | {name: getattr(result, name) for name, _ in own_fields(type(result))}


def _text(value: Any) -> str:
    """A value as llama-bench writes it: numbers with six digits, truth as 0 or 1."""
    return str(int(value)) if isinstance(value, bool) else (
        f"{value:f}" if isinstance(value, float) else str(value))


class Format:
    """A report in parts: `head`, a `row` a result, and `foot`; each is text with its line ends.

    `shown` names the parameters that a reader should see in a table, as they were varied.
    """

    def __init__(self, shown: Collection[str] = ()):
        self.shown = shown

    def head(self, first: Any) -> str:
        """What stands before the first result."""
        return ""

    def row(self, result: Any) -> str:
        raise AssertionError("a format has rows")

    def foot(self, last: Any) -> str:
        """What stands after the last one."""
        return ""


class Csv(Format):
    """A line of names, then every value in quotes."""

    def head(self, first: Any) -> str:
        return ",".join(record(first)) + "\n"

    def row(self, result: Any) -> str:
        quoted = (_text(value).replace('"', '""') for value in record(result).values())
        return ",".join(f'"{text}"' for text in quoted) + "\n"


class Jsonl(Format):
    """An object a line."""

    def values(self, result: Any) -> dict[str, Any]:
        """The fields, with the samples between llama-bench's and ours."""
        all_of_them = record(result)
        theirs = {name: all_of_them[name] for name in LLAMA_BENCH}
        return theirs | {name: getattr(result, name) for name in SAMPLES} | all_of_them

    def row(self, result: Any) -> str:
        return json.dumps(self.values(result)) + "\n"


class Json(Jsonl):
    """A list of objects, whole only with its foot; rows end their lines, for notes may follow."""

    def __init__(self, shown: Collection[str] = ()):
        super().__init__(shown)
        self._before = "[\n"

    def row(self, result: Any) -> str:
        lines = (f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in self.values(result).items())
        before, self._before = self._before, ",\n"
        return before + "  {\n" + ",\n".join(lines) + "\n  }\n"

    def foot(self, last: Any) -> str:
        return "]\n"


class Sql(Format):
    """A table `llama_bench` and an insertion a result, for SQLite."""

    def head(self, first: Any) -> str:
        types = [(name, type(default)) for name, default in LLAMA_BENCH.items()]
        columns = (f"  {n} {SQL_TYPES[kind]}" for n, kind in types + own_fields(type(first)))
        return "CREATE TABLE IF NOT EXISTS llama_bench (\n" + ",\n".join(columns) + "\n);\n\n"

    def row(self, result: Any) -> str:
        values = record(result)
        quoted = (_text(value).replace("'", "''") for value in values.values())
        return (f"INSERT INTO llama_bench ({', '.join(values)}) VALUES ("
                + ", ".join(f"'{text}'" for text in quoted) + ");\n")


class Column(NamedTuple):
    """A column of the table; numbers stand at the right."""

    name: str
    width: int
    text: Callable[[Any], str]
    right: bool = True

    def fitted(self, text: str) -> str:
        return text.rjust(self.width) if self.right else text.ljust(self.width)

    @property
    def rule(self) -> str:
        return "-" * (self.width - 1) + ":-"[not self.right]


def _size(n: float, steps: tuple[tuple[float, str], ...]) -> str:
    unit, name = next(s for s in steps if n >= s[0] or s is steps[-1])
    return f"{n / unit:.2f} {name}"


MODEL = (
    Column("model", 30, lambda r: r.model_type, right=False),
    Column("size", 10, lambda r: _size(r.model_size, ((1 << 30, "GiB"), (1 << 20, "MiB")))),
    Column("params", 10, lambda r: _size(r.model_n_params, ((1e9, "B"), (1e6, "M")))),
    Column("backend", 10, lambda r: r.backends, right=False),
)
# Parameters that a table has where they say something, by their field: name and width.
PARAMETERS = MappingProxyType(
    {
        "n_gpu_layers": ("ngl", 3), "n_threads": ("threads", 7), "n_batch": ("n_batch", 7),
        "n_ubatch": ("n_ubatch", 8), "type_k": ("type_k", 6), "type_v": ("type_v", 6),
        "flash_attn": ("fa", 3), "devices": ("dev", 12),
    }
)
TEST = (
    Column("test", 15, lambda r: r.name),
    Column("t/s", 20, lambda r: f"{r.avg_ts:.2f} ± {r.stddev_ts:.2f}"),
    Column("mode", 8, lambda r: r.graph_mode, right=False),
    Column("GB/s", 8, lambda r: f"{r.gb_per_s:.2f}"),
    Column("% peak", 7, lambda r: f"{r.pct_of_peak:.1f}"),
    Column("TFLOP/s", 7, lambda r: f"{r.tflops:.1f}" if r.n_prompt else ""),
    Column("% TFLOP", 7, lambda r: f"{r.pct_of_peak_tflops:.1f}" if r.n_prompt else ""),
    Column("ttft ms", 9, lambda r: f"{r.avg_ttft_ns / 1e6:.2f}"),
    Column("launches", 8, lambda r: str(r.n_launches)),
    Column("updates", 8, lambda r: str(r.node_updates)),
    Column("make ms", 8, lambda r: f"{r.prepare_ms:.2f}"),
)
# What a comparison's table has behind mode and speed; times are a token's.
COMPARED = (
    Column("us", 9, lambda r: f"{r.token_ns / 1e3:.1f}"),
    Column("busy", 8, lambda r: f"{r.busy_ns / 1e3:.1f}"),
    Column("gaps", 7, lambda r: f"{r.gaps_ns / 1e3:.1f}"),
    Column("waits", 8, lambda r: f"{r.waits_ns / 1e3:.1f}"),
    Column("host us", 8, lambda r: f"{r.host_us_per_token:.1f}"),
    Column("queued", 6, lambda r: f"{r.n_queued:.3g}"),
    Column("make ms", 8, lambda r: f"{r.prepare_ms:.2f}"),
    Column("MB", 5, lambda r: f"{r.graph_bytes / 1e6:.1f}"),
    Column("pays after", 10, lambda r: str(r.pays_after) if r.pays_after >= 0 else "never"),
)


def line(cells: Collection[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |\n"


class Markdown(Format):
    """llama-bench's table, our columns behind its own, and the build."""

    def head(self, first: Any) -> str:
        self.columns = self.chosen(first)
        return (line([c.fitted(c.name) for c in self.columns])
                + line([c.rule for c in self.columns]))

    def chosen(self, first: Any) -> tuple[Column, ...]:
        """The columns."""
        parameter = "n_threads" if first.backends == "CPU" else "n_gpu_layers"
        names = [name for name in PARAMETERS if name == parameter or name in self.shown]
        return (*MODEL, *(_parameter(name) for name in names), *TEST)

    def row(self, result: Any) -> str:
        return line([c.fitted(c.text(result)) for c in self.columns])

    def foot(self, last: Any) -> str:
        return f"\nbuild: {last.build_commit} ({last.build_number})\n"


class Comparative(Markdown):
    """The table of a comparison: what a token's time consists of."""

    def chosen(self, first: Any) -> tuple[Column, ...]:
        test, speed, mode, *_ = TEST
        return (MODEL[0], test, mode, speed, *COMPARED)


def _parameter(field: str) -> Column:
    name, width = PARAMETERS[field]
    default = LLAMA_BENCH[field]
    return Column(name, width, lambda r: _text(getattr(r, field, default)),
                  right=not isinstance(default, str) or width < 10)


FORMATS: Mapping[str, type[Format]] = MappingProxyType(
    {"csv": Csv, "json": Json, "jsonl": Jsonl, "md": Markdown, "sql": Sql}
)
