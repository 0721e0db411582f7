"""Prompt cache files: a sequence's tokens and KV, for another run of the same model.

    magic, version (u32), length of the header (u32), header (JSON), tokens (int32),
    keys and values as `KVCache.parts` orders them, CRC-32 of all from the header on (u32)

Numbers are little-endian. The header says which model wrote it; whatever does not fit is refused
with its reason. Knows a runner and a model's file, no prompt and no option.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llamagraph.errors import LlamaGraphError
from llamagraph.files import replacing
from llamagraph.gguf.reader import GGUFFile
from llamagraph.runner import Runner

MAGIC, VERSION = b"LGPROMPT", 1
START = struct.Struct("<8sII")
CRC_BYTES, MOST_HEADER = 4, 1 << 20
SAMPLE = 512  # bytes of each tensor that are looked at, at its start, middle and end
ADVICE = "delete it, or name another file"


def table_hash(file: GGUFFile) -> Any:
    """Of the files' sizes and dates, metadata and tensor table as they are stored.

    A whole file is too long to be read for this; whatever is written to it changes its date.
    """
    digest = hashlib.sha256()
    first: dict[Path, int] = {}
    for t in file.tensors.values():
        first[t.path] = min(t.offset, first.get(t.path, t.offset))
    for path, n_bytes in first.items():
        digest.update(f"{path.stat().st_size} {path.stat().st_mtime_ns} ".encode())
        with path.open("rb") as opened:
            digest.update(opened.read(n_bytes))
    return digest


def model_hash(file: GGUFFile) -> str:
    """The same with samples of all tensors."""
    digest = table_hash(file)
    for name in file.tensors:
        data = file.data(name)
        for start in (0, len(data) // 2, max(0, len(data) - SAMPLE)):
            digest.update(data[start : start + SAMPLE].tobytes())
    return digest.hexdigest()


def _facts(file: GGUFFile, runner: Runner) -> dict[str, Any]:
    """What a file must agree with, by the name that a message gives it."""
    return {
        "model": model_hash(file),
        "adapters": [[table_hash(x).hexdigest(), scale] for x, scale in runner.adapters.applied()],
        "options": hashlib.sha256(repr(runner.config).encode()).hexdigest(),
        "types": [f"{layer.k.dtype}/{layer.v.dtype}" for layer in runner.kv.layers],
    }


def save(path: Path, file: GGUFFile, runner: Runner) -> None:
    """Writes the runner's sequence; the old file stays until the new one is whole.

    An answer that still runs ends. Raises LlamaGraphError where the file cannot be written.
    """
    runner.reset(min(runner.n_past, len(runner.sequence)))
    with replacing(path) as out:
        _write(out, file, runner)


def _write(out: BinaryIO, file: GGUFFile, runner: Runner) -> None:
    n, held = len(runner.sequence), runner.kv.held
    parts = list(runner.kv.parts(n, held))
    header = json.dumps({**_facts(file, runner), "n_tokens": n, "held": held,
                         "n_bytes": sum(part.n_bytes for part in parts)}).encode()
    out.write(START.pack(MAGIC, VERSION, len(header)) + header)
    tokens = np.array(runner.sequence, "<i4").tobytes()
    crc = zlib.crc32(tokens, zlib.crc32(header))
    out.write(tokens)
    for part in parts:
        data = runner.device.memory.read(part).tobytes()
        crc = zlib.crc32(data, crc)
        out.write(data)
    out.write(struct.pack("<I", crc))


def load(path: Path, file: GGUFFile, runner: Runner) -> int:
    """Makes the file's tokens the runner's sequence; how many.

    Raises LlamaGraphError with the reason for a file that does not fit; nothing has changed then.
    """
    try:
        with path.open("rb") as opened:
            return _read(opened, path, file, runner)
    except OSError as error:
        raise LlamaGraphError(f"{path}: cannot be read: {error.strerror}") from None


def _read(opened: BinaryIO, path: Path, file: GGUFFile, runner: Runner) -> int:
    header = _header(opened, path, _facts(file, runner))
    n, held, start = header["n_tokens"], header["held"], opened.tell()
    if n > runner.n_ctx:
        raise LlamaGraphError(f"{path}: holds {n} tokens, the context {runner.n_ctx}; raise -c")
    parts = list(runner.kv.parts(n, held))
    if sum(part.n_bytes for part in parts) != header["n_bytes"]:
        raise LlamaGraphError(f"{path}: its KV cache has another shape; {ADVICE}")
    opened.seek(START.size)
    crc = 0
    for data in _chunks(opened, start - START.size + 4 * n + header["n_bytes"]):
        crc = zlib.crc32(data, crc)
    if opened.read(CRC_BYTES) != struct.pack("<I", crc):
        raise LlamaGraphError(f"{path}: is damaged; {ADVICE}")
    opened.seek(start)
    tokens = np.frombuffer(opened.read(4 * n), "<i4").tolist()
    runner.reset()
    runner.write_tokens(tokens)
    runner.kv.grow(runner.device.memory, n)
    for part in parts:
        runner.device.memory.write(part, np.frombuffer(opened.read(part.n_bytes), np.uint8))
    runner.kv.held = held
    runner.kv.stored(n)
    runner.take_as_read(n)
    return n


def _chunks(opened: BinaryIO, n_bytes: int) -> Iterator[bytes]:
    while n_bytes > 0 and (data := opened.read(min(n_bytes, 1 << 24))):
        n_bytes -= len(data)
        yield data


def _header(opened: BinaryIO, path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The header of a file that is whole and of this model."""
    size = os.fstat(opened.fileno()).st_size
    start = opened.read(START.size)
    if len(start) < START.size or not start.startswith(MAGIC):
        raise LlamaGraphError(f"{path}: is no prompt cache; {ADVICE}")
    _, version, length = START.unpack(start)
    if version != VERSION:
        raise LlamaGraphError(f"{path}: has version {version}, this program writes {VERSION}; "
                              f"{ADVICE}")
    header: dict[str, Any] = {}
    with suppress(ValueError):
        found = json.loads(opened.read(min(length, MOST_HEADER)))
        header = found if isinstance(found, dict) else {}
    numbers = [header.get(name) for name in ("n_tokens", "held", "n_bytes")]
    n, held, n_bytes = (x if isinstance(x, int) and x >= 0 else -1 for x in numbers)
    if min(n, held, n_bytes) < 0 or held > n or size != (
            START.size + length + 4 * n + n_bytes + CRC_BYTES):
        raise LlamaGraphError(f"{path}: is cut off or damaged; {ADVICE}")
    if reason := _mismatch(header, facts):
        raise LlamaGraphError(f"{path}: {reason}; {ADVICE}")
    return header


def _mismatch(header: dict[str, Any], facts: dict[str, Any]) -> str:
    """Why a file does not fit, or nothing."""
    if header.get("model") != facts["model"]:
        return "was written by another model, or by this one before its file was changed or copied"
    if header.get("adapters") != facts["adapters"]:
        return "was written with other LoRA adapters, or with other scales"
    if header.get("types") != facts["types"]:
        return (f"holds a KV cache in {_named(header.get('types'))}, here it is in "
                f"{_named(facts['types'])} (--device, -ctk and -ctv decide)")
    if header.get("options") != facts["options"]:
        return "was written with other model options (--rope-*, --yarn-*, --override-kv)"
    return ""


def _named(types: Any) -> str:
    return ", ".join(dict.fromkeys(map(str, types))) if isinstance(types, list) else "nothing"
