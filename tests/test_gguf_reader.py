"""The reader: what a writer wrote comes back, split models, and the lookup of keys."""

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import (
    Tensor,
    Typed,
    gguf_bytes,
    quantised,
    refusal,
    text_bytes,
    tiny_llama,
    value_bytes,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from llamagraph.errors import FormatError
from llamagraph.gguf import QUANTS, GGUFFile, Metadata

F32_ROW = Tensor("a.weight", (8,), "F32", bytes(range(32)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


PAIRS = {
    "text": "héllo\n▁",
    "empty text": "",
    "not utf-8": b"\xff\xfe".decode("utf-8", "surrogateescape"),
    "yes": True,
    "no": False,
    "uint8": Typed(0, 255),
    "int8": Typed(1, -128),
    "uint16": Typed(2, 65535),
    "int16": Typed(3, -32768),
    "uint32": Typed(4, 2**32 - 1),
    "int32": Typed(5, -(2**31)),
    "float32": Typed(6, 0.25),
    "uint64": Typed(10, 2**64 - 1),
    "int64": Typed(11, -(2**63)),
    "float64": Typed(12, 0.1),
    "texts": ["", "a", "ü", "\0"],
    "no texts": [],
    "bools": np.array([True, False]),
    "floats": np.array([0.5, np.inf], np.float32),
    "no numbers": np.array([], np.int32),
}


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_comes_back(folder, version):
    path = write(folder, gguf_bytes(PAIRS, version=version))
    with GGUFFile(path) as file:
        assert (file.path, file.version, file.tensors) == (path, version, {})
        assert list(file.metadata) == list(PAIRS)
        for key, wanted in PAIRS.items():
            wanted = wanted.value if isinstance(wanted, Typed) else wanted
            found = file.metadata[key]
            assert type(found) is type(wanted)
            np.testing.assert_array_equal(found, wanted)
            assert getattr(found, "dtype", None) == getattr(wanted, "dtype", None)


@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_tensors_come_back(folder, alignment):
    rng = np.random.default_rng(0)
    tensors = [
        quantised("token_embd.weight", rng.standard_normal((5, 64)), "Q8_0"),
        Tensor("scalar", (), "F32", struct.pack("<f", 2.5)),
        Tensor("nothing", (0,), "F32", b""),
        Tensor("four", (2, 3, 5, 7), "I8", bytes(210)),
        quantised("last", rng.standard_normal(3), "F16"),
    ]
    path = write(
        folder, gguf_bytes({"general.alignment": alignment}, tensors, alignment=alignment)
    )
    with GGUFFile(path) as file:
        assert list(file.tensors) == [t.name for t in tensors]
        for t in tensors:
            info = file.tensors[t.name]
            assert (info.name, info.shape, info.quant) == (t.name, t.shape, QUANTS[t.quant])
            assert (info.n_bytes, info.path) == (len(t.raw), path)
            assert path.read_bytes()[info.offset : info.offset + info.n_bytes] == t.raw
            assert file.data(t.name).tobytes() == t.raw


def test_data_is_a_read_only_view_that_outlives_the_file(folder):
    path = write(folder, gguf_bytes({}, [F32_ROW]))
    with GGUFFile(path) as file:
        data = file.data("a.weight")
    assert (data.dtype, data.shape) == (np.uint8, (32,))
    assert not data.flags.owndata and not data.flags.writeable
    assert data.tobytes() == F32_ROW.raw


def test_the_padding_after_the_last_tensor_may_be_missing(folder):
    data = gguf_bytes({}, [Tensor("x", (1,), "F32", bytes(4))])
    with GGUFFile(write(folder, data[:-28])) as file:
        assert file.data("x").tobytes() == bytes(4)


def test_what_is_no_file_is_named(tmp_path):
    assert "No such file" in refusal(tmp_path / "absent.gguf")
    assert "is a folder" in refusal(tmp_path)
    assert "cannot be read" in refusal(tmp_path / ("n" * 5000))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert "is not a regular file" in refusal(tmp_path / "pipe")


def split_model(folder: Path, second: Mapping[str, Any] | None = None, tensor: str = "t1") -> Path:
    """A model in three parts of one tensor each; the second one can be made to differ."""
    for number in range(3):
        pairs = {
            "split.no": Typed(2, number),
            "split.count": Typed(2, 3),
            "split.tensors.count": Typed(5, 3),
            "only": number,
        }
        if number == 1:
            pairs |= second or {}
        name = tensor if number == 1 else f"t{number}"
        part = gguf_bytes(pairs, [Tensor(name, (4,), "I8", bytes([number] * 4))])
        write(folder, part, f"m-{number + 1:05d}-of-00003.gguf")
    return folder / "m-00001-of-00003.gguf"


def test_a_split_model_is_opened_from_its_first_part(tmp_path):
    with GGUFFile(split_model(tmp_path)) as file:
        assert file.metadata["only"] == 0
        for number in range(3):
            info = file.tensors[f"t{number}"]
            assert info.path.name == f"m-{number + 1:05d}-of-00003.gguf"
            assert file.data(info.name).tolist() == [number] * 4


def test_one_of_one_part_is_a_plain_file(tmp_path):
    data = gguf_bytes({"split.no": 0, "split.count": 1, "split.tensors.count": 0})
    assert GGUFFile(write(tmp_path, data)).tensors == {}


def test_faults_of_split_models_are_named(tmp_path):
    first = split_model(tmp_path)
    second = first.with_name("m-00002-of-00003.gguf")
    assert refusal(second) == "is part 2 of 3; open the first part"
    for changes, tensor, expected in (
        ({"split.no": Typed(2, 2)}, "t1", "split.no is 2, not 1"),
        ({"split.count": Typed(2, 4)}, "t1", "split.count is 4, not 3"),
        ({"split.no": "x"}, "t1", "split.no is 'x', not a whole number"),
        ({}, "t0", "tensor 't0' is in an earlier part too"),
    ):
        split_model(tmp_path, changes, tensor)
        with pytest.raises(FormatError) as caught:
            GGUFFile(first)
        assert str(caught.value) == f"{second}: {expected}"
    second.unlink()
    with pytest.raises(FormatError) as caught:
        GGUFFile(first)
    assert str(caught.value) == f"{second}: is missing, part 2 of 3 of this model"
    renamed = first.rename(tmp_path / "renamed.gguf")
    assert "its name must end in -00001-of-00003.gguf" in refusal(renamed)


def test_the_tensors_of_all_parts_are_counted(tmp_path):
    first = split_model(tmp_path)
    wrong = first.read_bytes().replace(
        text_bytes("split.tensors.count") + value_bytes(Typed(5, 3)),
        text_bytes("split.tensors.count") + value_bytes(Typed(5, 4)),
    )
    first.write_bytes(wrong)
    assert refusal(first) == "split.tensors.count is 4, the 3 parts hold 3 tensors"


METADATA = Metadata(
    Path("m.gguf"),
    {
        "int": 3,
        "float": 1.5,
        "nan": float("nan"),
        "bool": True,
        "text": "a",
        "texts": ["a"] * 5,
        "numbers": np.arange(7),
    },
)


def test_values_are_looked_up_by_kind():
    assert METADATA.require("int", int) == 3
    assert METADATA.require("float", float) == 1.5
    assert type(METADATA.require("int", float)) is float
    assert METADATA.require("bool", bool) is True
    assert METADATA.require("text", str) == "a"
    assert METADATA.require("texts", list) == ["a"] * 5
    assert METADATA.require("numbers", np.ndarray).tolist() == list(range(7))
    assert METADATA.scalar("int", int) == 3
    assert METADATA.scalar("absent", int, 4) == 4
    assert METADATA.scalar("absent", int, None) is None
    assert METADATA.get("absent", "x") == "x"
    assert len(METADATA) == 7


@pytest.mark.parametrize(
    ("key", "kind", "line"),
    [
        ("absent", int, "m.gguf: absent is missing (a whole number is needed)"),
        ("float", int, "m.gguf: float is 1.5, not a whole number"),
        ("bool", int, "m.gguf: bool is True, not a whole number"),
        ("bool", float, "m.gguf: bool is True, not a finite number"),
        ("nan", float, "m.gguf: nan is nan, not a finite number"),
        ("int", bool, "m.gguf: int is 3, not true or false"),
        ("int", str, "m.gguf: int is 3, not a text"),
        ("numbers", float, "m.gguf: numbers is an array of 7, not a finite number"),
        ("texts", str, "m.gguf: texts is an array of 5, not a text"),
        ("text", np.ndarray, "m.gguf: text is 'a', not an array of numbers"),
    ],
)
def test_values_of_another_kind_are_named(key, kind, line):
    with pytest.raises(FormatError) as caught:
        METADATA.scalar(key, kind)
    assert str(caught.value) == line


INT32, FLOAT32 = st.integers(-(2**31), 2**31 - 1), st.floats(width=32, allow_nan=False)
KEYS = st.text(min_size=1, max_size=20).map("key.{}".format)
VALUES = (
    (st.booleans() | INT32 | FLOAT32 | st.text(min_size=1))  # GGUFWriter leaves empty texts out
    | st.lists(st.text(), min_size=1, max_size=5)
    | st.lists(INT32, min_size=1, max_size=5)
    | st.lists(FLOAT32, min_size=1, max_size=5)
)
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
NAMES = st.text(st.characters(codec="ascii"), max_size=63)


def write_with_gguf(
    path: Path, pairs: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    names = {bool: "bool", int: "int32", float: "float32", str: "string", list: "array"}
    for key, value in pairs.items():
        getattr(writer, f"add_{names[type(value)]}")(key, value)
    for name, weights in arrays.items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@settings(deadline=None, max_examples=50)
@given(
    pairs=st.dictionaries(KEYS, VALUES, max_size=6),
    shapes=st.dictionaries(NAMES, SHAPES, max_size=4),
)
def test_what_the_gguf_package_writes_comes_back(folder, pairs, shapes):
    path = folder / "random.gguf"
    rng = np.random.default_rng(0)
    arrays = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
    write_with_gguf(path, pairs, arrays)
    with GGUFFile(path) as file:
        found = {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in file.metadata.items()
        }
        assert found == {"general.architecture": "llama"} | pairs
        assert list(file.tensors) == list(arrays)
        for name, weights in arrays.items():
            raw = file.data(name).view(np.float32)
            assert np.array_equal(raw.reshape(file.tensors[name].shape), weights)


def test_a_model_reads_as_with_the_gguf_package(folder):
    path = write(folder, tiny_llama(), "llama.gguf")
    reference = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        keys = [key for key in reference.fields if not key.startswith("GGUF.")]
        assert list(file.metadata) == keys
        for key in keys:
            np.testing.assert_array_equal(file.metadata[key], reference.fields[key].contents())
        assert list(file.tensors) == [t.name for t in reference.tensors]
        for t in reference.tensors:
            info = file.tensors[t.name]
            assert (info.quant.name, info.offset) == (t.tensor_type.name, t.data_offset)
            assert (info.shape, info.n_bytes) == (tuple(t.shape.tolist()[::-1]), t.n_bytes)
            assert np.array_equal(file.data(t.name), t.data.view(np.uint8).ravel())
