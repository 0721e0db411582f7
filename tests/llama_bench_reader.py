"""A reader made for llama-bench's output: it knows its fields and types, and nothing of ours.

What it does not know it passes over, as a script does that reads the fields it wants by name.
"""

import csv
import io
import json
import re
import sqlite3

TEXT, INTEGER, REAL, TRUTH = str, int, float, bool
FIELDS = {
    "build_commit": TEXT, "build_number": INTEGER, "cpu_info": TEXT, "gpu_info": TEXT,
    "backends": TEXT, "model_filename": TEXT, "model_type": TEXT, "model_size": INTEGER,
    "model_n_params": INTEGER, "n_batch": INTEGER, "n_ubatch": INTEGER, "n_threads": INTEGER,
    "cpu_mask": TEXT, "cpu_strict": TRUTH, "poll": INTEGER, "type_k": TEXT, "type_v": TEXT,
    "n_gpu_layers": INTEGER, "n_cpu_moe": INTEGER, "split_mode": TEXT, "main_gpu": INTEGER,
    "no_kv_offload": TRUTH, "flash_attn": INTEGER, "devices": TEXT, "tensor_split": TEXT,
    "tensor_buft_overrides": TEXT, "load_mode": TEXT, "lazy_mode": TEXT, "embeddings": TRUTH,
    "no_op_offload": INTEGER, "no_host": TRUTH, "repack": TRUTH, "fit_target": INTEGER,
    "fit_min_ctx": INTEGER, "n_prompt": INTEGER, "n_gen": INTEGER, "n_depth": INTEGER,
    "test_time": TEXT, "avg_ns": INTEGER, "stddev_ns": INTEGER, "avg_ts": REAL, "stddev_ts": REAL,
}


def _in_order(names) -> None:
    assert list(names)[: len(FIELDS)] == list(FIELDS)


def _checked(row) -> dict:
    """A row's known fields; their values must hang together."""
    found = {name: row[name] for name in FIELDS}
    for name, kind in FIELDS.items():
        assert type(found[name]) is kind, f"{name} is {found[name]!r}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["test_time"])
    n_tokens = found["n_prompt"] + found["n_gen"]
    # The mean of reciprocals is at least the reciprocal of the mean.
    assert n_tokens > 0 and found["avg_ts"] * found["avg_ns"] / 1e9 / n_tokens > 0.999
    return found


def _with_samples(row) -> dict:
    n_tokens = row["n_prompt"] + row["n_gen"]
    for ns, ts in zip(row["samples_ns"], row["samples_ts"], strict=True):
        assert abs(ns * ts / 1e9 / n_tokens - 1) < 1e-3
    return _checked(row)


def read_json(text: str) -> list[dict]:
    rows = json.loads(text)
    for row in rows:
        _in_order(row)
    return [_with_samples(row) for row in rows]


def read_jsonl(text: str) -> list[dict]:
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        _in_order(row)
    return [_with_samples(row) for row in rows]


def read_csv(text: str) -> list[dict]:
    """Every value stands in quotes, truths are 0 or 1."""
    assert all(line[0] == line[-1] == '"' for line in text.splitlines()[1:])
    rows = list(csv.DictReader(io.StringIO(text)))
    for row in rows:
        _in_order(row)
    return [_checked({n: bool(int(r[n])) if k is TRUTH else k(r[n]) for n, k in FIELDS.items()})
            for r in rows]


def read_sql(text: str) -> list[dict]:
    """The statements must run in SQLite; its columns give the types."""
    with sqlite3.connect(":memory:") as base:
        base.executescript(text)
        found = base.execute("SELECT * FROM llama_bench")
        names = [column[0] for column in found.description]
        rows = [dict(zip(names, row, strict=True)) for row in found]
    base.close()
    _in_order(names)
    return [_checked({n: bool(r[n]) if k is TRUTH else r[n] for n, k in FIELDS.items()})
            for r in rows]


READERS = {"csv": read_csv, "json": read_json, "jsonl": read_jsonl, "sql": read_sql}
