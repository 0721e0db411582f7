"""Breaks GGUF files: 300 damaged ones from a valid one, of every kind, repeatable from a seed.

    python tests/damage.py VALID.gguf FOLDER [SEED]     writes FOLDER/000.gguf ..., prints labels

Only damage that can be noticed is done. A label starts with `reader:` where the container itself is
broken, and with `model:` where only a model's loader, which knows what the keys and tensors mean,
can tell. Flipped bits inside weights make another valid file, so there are none.
"""

import pathlib
import random
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle

from gguf_files import ARRAY, CODES, STRING

N_FILES = 300


@dataclass(frozen=True)
class Field:
    """A piece of a GGUF file: what it is, whose, and its bytes' range."""

    what: str
    owner: str
    start: int
    stop: int


class Scanner:
    """Walks a valid file and notes every field; made for breaking files, not for reading them."""

    def __init__(self, data: bytes) -> None:
        self.data, self.pos, self.owner = data, 0, "header"
        self.fields: list[Field] = []

    def note(self, what: str, n_bytes: int) -> int:
        """Note the next bytes as a field; their little-endian value."""
        start, self.pos = self.pos, self.pos + n_bytes
        self.fields.append(Field(what, self.owner, start, self.pos))
        return int.from_bytes(self.data[start : self.pos], "little")

    def text(self, what: str) -> str:
        length = self.note(f"{what} length", 8)
        self.note(what, length)
        return self.data[self.pos - length : self.pos].decode()

    def value(self, kind: int) -> None:
        if kind == STRING:
            self.text("text value")
        elif kind == ARRAY:
            element, count = self.note("element type", 4), self.note("array count", 8)
            if element == STRING:
                for _ in range(count):
                    self.text("element")
            else:
                self.note("array", count * struct.calcsize("<" + CODES[element]))
        else:
            self.note("number", struct.calcsize("<" + CODES[kind]))

    def scan(self) -> list[Field]:
        self.note("magic", 4)
        self.note("version", 4)
        n_tensors, n_pairs = self.note("tensor count", 8), self.note("key count", 8)
        for _ in range(n_pairs):
            self.owner = "a key"
            self.owner = self.text("key")
            self.value(self.note("value type", 4))
        for _ in range(n_tensors):
            self.owner = "a tensor"
            self.owner = self.text("tensor name")
            for _ in range(self.note("dimension count", 4)):
                self.note("dimension", 8)
            self.note("tensor type", 4)
            self.note("tensor offset", 8)
        self.owner = "data"
        self.note("padding", -self.pos % 32)
        self.note("tensor data", len(self.data) - self.pos)
        return self.fields


def fields(data: bytes) -> list[Field]:
    """Every field of a valid file with the alignment 32, in order."""
    return Scanner(data).scan()


Damage = tuple[str, bytes]

ALL_ONES = -1


def more(old: int) -> int:
    return old + 1


def less(old: int) -> int:
    return old - 1


def next_block(old: int) -> int:
    return old + 32


Wrong = tuple[int | Callable[[int], int], ...]

# What to put into a field in place of its value; most of it shifts all that follows.
WRONG: Mapping[str, Wrong] = {
    "magic": (int.from_bytes(b"GGML", "little"), int.from_bytes(b"gguf", "little"), more),
    "version": (0, 1, 4, 0x03000000, ALL_ONES),
    "tensor count": (more, 1 << 20, 1 << 63, ALL_ONES),
    "key count": (more, less, 1 << 20, ALL_ONES),
    "key length": (0, more, less, 1 << 63),
    "value type": (13, 255, 1 << 31, ALL_ONES),
    "text value length": (more, (1 << 30) + 1, ALL_ONES),
    "element length": (less, 1 << 40, ALL_ONES),
    "element type": (ARRAY, 13, ALL_ONES),
    "array count": (more, (1 << 30) + 1, 1 << 61),
    "tensor name length": (more, 64, ALL_ONES),
    "dimension count": (0, 5, ALL_ONES),
    "dimension": (more, 0, 1 << 62, 1 << 63),
    "tensor type": (4, 15, 40, 99, ALL_ONES),
    "tensor offset": (more, next_block, ALL_ONES),
    "alignment": (0, 3, 48, 1 << 31),
}
NAN, INFINITY = 0x7FC00000, 0x7F800000
# The same for keys that a model reads: the end of the key, and numbers that no model can have.
WRONG_NUMBERS: Mapping[str, Wrong] = {
    ".block_count": (0, more, ALL_ONES),
    ".context_length": (0,),
    ".embedding_length": (0, next_block, ALL_ONES),
    ".feed_forward_length": (0, next_block),
    ".attention.head_count": (0, ALL_ONES),
    ".attention.head_count_kv": (0, more),
    ".layer_norm_rms_epsilon": (NAN, INFINITY),
    ".rope.freq_base": (NAN, 0),
}
NEEDED_KEYS = (
    "general.architecture",
    ".block_count",
    ".embedding_length",
    ".attention.head_count",
    ".layer_norm_rms_epsilon",
    "tokenizer.ggml.model",
    "tokenizer.ggml.tokens",
)
IMPOSTORS: Mapping[str, bytes] = {
    "an empty file": b"",
    "four bytes": b"GGUF",
    "a web page": b"<!DOCTYPE html>\n<html><body>404 not found</body></html>\n",
    "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "a safetensors file": struct.pack("<Q", 24) + b'{"__metadata__":{}}     ',
    "a zip archive": b"PK\x03\x04" + bytes(60),
    "zeros": bytes(4096),
}


class Breaker:
    """Breaks one valid file in one way after another."""

    def __init__(self, data: bytes, rng: random.Random) -> None:
        self.data, self.rng = data, rng
        self.by_kind: dict[str, list[Field]] = defaultdict(list)
        all_fields = fields(data)
        last = next(f.owner for f in reversed(all_fields) if f.what == "tensor offset")
        for field in all_fields:
            if field.owner == "general.alignment" and field.what == "number":
                self.by_kind["alignment"].append(field)
            elif field.owner != last or field.what != "dimension":  # no tensor follows to show it
                self.by_kind[field.what].append(field)

    def put(self, field: Field, new: int | bytes) -> bytes:
        if isinstance(new, int):
            n_bytes = field.stop - field.start
            new = (new & ((1 << 8 * n_bytes) - 1)).to_bytes(n_bytes, "little")
        return self.data[: field.start] + new + self.data[field.stop :]

    def wrong_value(self, field: Field, choices: Wrong) -> int:
        choice = self.rng.choice(choices)
        if isinstance(choice, int):
            return choice
        return choice(int.from_bytes(self.data[field.start : field.stop], "little"))

    def cut(self) -> Damage:
        """The file ends early: before, in or after a field of any kind."""
        field = self.rng.choice(self.by_kind[self.rng.choice(list(self.by_kind))])
        where = self.rng.randint(field.start, field.stop)
        # The file may well end after its last byte, and in nothing but padding.
        where = min(where, len(self.data) - 32)
        return f"reader: cut at byte {where}, {field.what} of {field.owner}", self.data[:where]

    def wrong(self) -> Damage:
        """A count, length, type, dimension or offset that cannot be."""
        what = self.rng.choice([kind for kind in WRONG if self.by_kind[kind]])
        field = self.rng.choice(self.by_kind[what])
        new = self.wrong_value(field, WRONG[what])
        return f"reader: {what} of {field.owner} is {new}", self.put(field, new)

    def twice(self) -> Damage:
        """A key or a tensor that is there twice."""
        pairs = [
            (one, other)
            for kind in ("key", "tensor name")
            for one in self.by_kind[kind]
            for other in self.by_kind[kind]
            if one is not other and one.stop - one.start == other.stop - other.start
        ]
        one, other = self.rng.choice(pairs)
        copy = self.data[other.start : other.stop]
        return f"reader: {one.what} {copy.decode()} twice", self.put(one, copy)

    def number(self) -> Damage:
        """A key's number that no model can have."""
        candidates = [
            (field, end)
            for end in WRONG_NUMBERS
            for field in self.by_kind["number"]
            if field.owner.endswith(end)
        ]
        field, end = self.rng.choice(candidates)
        new = self.wrong_value(field, WRONG_NUMBERS[end])
        return f"model: {field.owner} is {new:#x}", self.put(field, new)

    def name(self) -> Damage:
        """A key, an architecture, a tokenizer or a tensor of another name."""
        candidates = [
            field
            for field in self.by_kind["key"]
            if self.data[field.start : field.stop].decode().endswith(NEEDED_KEYS)
        ]
        candidates += [f for f in self.by_kind["text value"] if f.owner in NEEDED_KEYS]
        candidates += [
            field
            for field in self.by_kind["tensor name"]
            if b"weight" in self.data[field.start : field.stop]
        ]
        field = self.rng.choice(candidates)
        text = bytearray(self.data[field.start : field.stop])
        text[self.rng.randrange(len(text))] ^= 0x80 if self.rng.random() < 0.3 else 0x01
        return f"model: a {field.what} is {bytes(text)!r}", self.put(field, bytes(text))

    def kind(self) -> Damage:
        """A whole number of a model stored as a real one."""
        needed = tuple(key for key in NEEDED_KEYS if key.endswith(("count", "length")))
        owners = {f.owner: f for f in self.by_kind["number"] if f.owner.endswith(needed)}
        field = self.rng.choice([f for f in self.by_kind["value type"] if f.owner in owners])
        return f"model: {field.owner} is a float", self.put(field, 6)


def damaged_files(seed: int, valid_bytes: bytes, count: int = N_FILES) -> Iterator[Damage]:
    """`count` different damaged files, each with what was done to it."""
    b = Breaker(valid_bytes, random.Random(seed))
    seen = {valid_bytes}
    for what, data in IMPOSTORS.items():
        seen.add(data)
        yield f"reader: {what}", data
    often = (b.cut, b.wrong)
    ways = cycle((*often, b.number, *often, b.name, *often, b.twice, *often, b.kind))
    while len(seen) <= count:
        label, data = next(ways)()
        if data not in seen:
            seen.add(data)
            yield label, data


def main(valid: str, folder: str, seed: str = "0") -> None:
    out = pathlib.Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for i, (label, data) in enumerate(damaged_files(int(seed), pathlib.Path(valid).read_bytes())):
        (out / f"{i:03d}.gguf").write_bytes(data)
        print(f"{i:03d} {label}")


if __name__ == "__main__":
    main(*sys.argv[1:])
