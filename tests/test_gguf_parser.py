"""The parser: every rule that a file can break is named in one line, and nothing else is raised."""

import struct

import pytest
from gguf_files import Typed, refusal, text_bytes, tiny_llama, value_bytes, write
from hypothesis import given, settings
from hypothesis import strategies as st

from llamagraph.errors import FormatError
from llamagraph.gguf import GGUFFile


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


def pair(key: str | bytes, value: bytes, after: bytes = b"", count: int = 1) -> bytes:
    """A file of one key, whose value is given in bytes, with its type."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, count)
    return head + text_bytes(key) + value + after + bytes(64)


def tensor_file(*tensors: bytes, pairs: int = 0, before: bytes = b"") -> bytes:
    """A file of tensor infos given in bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), pairs) + before
    return head + b"".join(tensors) + bytes(1024)


def info(
    name: str | bytes = "x", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0
) -> bytes:
    packed = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return text_bytes(name) + packed


def header(version: int, n_tensors: int = 0, n_pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs)


def array(kind: int, count: int) -> bytes:
    return struct.pack("<IIQ", 9, kind, count)


U32_ONE = value_bytes(1)
BROKEN = {
    "empty": (b"", "is empty"),
    "no magic": (b"GGML" + bytes(60), "is not a GGUF file"),
    "safetensors": (struct.pack("<Q", 30) + b'{"__metadata__": {}}', "a safetensors file"),
    "zip": (b"PK\x03\x04" + bytes(50), "a zip archive"),
    "pickle": (b"\x80\x02}q\x00", "a pickled PyTorch model"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "html": (b"\n<!doctype html>", "a web page"),
    "ggml": (b"tjgg" + bytes(50), "before GGUF"),
    "zeros": (bytes(100), "not finished"),
    "text": (b"hello", "it starts with b'hello'"),
    "version 0": (header(0), "GGUF version 0"),
    "version 1": (header(1), "GGUF version 1"),
    "version 4": (header(4), "GGUF version 4"),
    "endianness": (header(3 << 24), "big-endian"),
    "short header": (header(3)[:20], "ends inside the header"),
    "tensor count": (header(3, n_tensors=10), "counts 10 tensors"),
    "negative tensor count": (header(3, n_tensors=2**64 - 1), "counts 18446744073709551615"),
    "key count": (header(3, n_pairs=10), "counts 10 keys"),
    "empty key": (pair("", U32_ONE), "key 1 of 1 is empty"),
    "key twice": (pair("k", U32_ONE, text_bytes("k") + U32_ONE, 2), "key 'k' is there twice"),
    "long key": (header(3, n_pairs=1) + struct.pack("<Q", 2**30 + 1) + bytes(9), "over 1 GiB"),
    "key past the end": (header(3, n_pairs=1) + struct.pack("<Q", 99) + bytes(9), "key 1 of 1"),
    "value type": (pair("k", struct.pack("<I", 13)), "the value of 'k' is of unknown type 13"),
    "array of arrays": (pair("k", array(9, 1)), "array of arrays"),
    "element type": (pair("k", array(99, 1)), "array of unknown type 99"),
    "array count": (pair("k", array(0, 999)), "counts 999 elements"),
    "huge array": (pair("k", array(0, 2**30 + 1)), "counts 1073741825 elements"),
    "text count": (pair("k", array(8, 9)), "counts 9 elements"),
    "text in array": (pair("k", array(8, 2), text_bytes("a") + b"\xff" * 8), "over 1 GiB"),
    "text past the end": (pair("k", array(8, 1), struct.pack("<Q", 99)), "ends inside the value"),
    "array cut": (pair("k", array(8, 8), struct.pack("<Q", 60)), "ends inside the value of 'k'"),
    "alignment type": (pair("general.alignment", value_bytes(Typed(10, 32))), "not uint32"),
    "alignment 0": (pair("general.alignment", value_bytes(0)), "is 0, not a power of two"),
    "alignment 48": (pair("general.alignment", value_bytes(48)), "is 48, not a power of two"),
    "tensor twice": (tensor_file(info(), info(offset=32)), "tensor 'x' is there twice"),
    "long name": (tensor_file(info("n" * 64)), "its name has 64 bytes or more"),
    "long name in bytes": (tensor_file(info("ü" * 32)), "its name has 64 bytes or more"),
    "dimensions": (tensor_file(info(dims=(1,) * 5)), "has 5 dimensions"),
    "negative dimension": (tensor_file(info(dims=(2**63,))), "cannot have the shape"),
    "too many elements": (tensor_file(info(dims=(2**32, 2**31))), "cannot have the shape"),
    "unknown type": (tensor_file(info(kind=5)), "is of unknown type 5; supported types: F32"),
    "refused type": (tensor_file(info(kind=40)), "is of type NVFP4; supported types: F32"),
    "blocks": (tensor_file(info(dims=(40,), kind=2)), "rows of 40, not a multiple of 32 (Q4_0)"),
    "scalar block": (tensor_file(info(dims=(), kind=2)), "rows of 1, not a multiple of 32"),
    "offset": (tensor_file(info(offset=32)), "has offset 32, not 0"),
    "overlap": (tensor_file(info("a"), info("b", offset=0)), "tensor 'b' has offset 0, not 32"),
    "data cut": (tensor_file(info(dims=(2**20,))), "ends inside tensor 'x'"),
    "data huge": (tensor_file(info(dims=(2**62,))), "ends inside tensor 'x'"),
    "no data": (header(3, n_tensors=1) + info(), "ends inside tensor 'x'"),
}


@pytest.mark.parametrize(("data", "expected"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_named(folder, data, expected):
    assert expected in refusal(write(folder, data))


def test_names_from_the_file_stay_short_and_on_one_line(folder):
    line = refusal(write(folder, tensor_file(info("\n\r\x1b" + "n" * 1000))))
    assert len(line) < 150


VALID = tiny_llama()
HEAD_BYTES = 9000  # header, keys and tensor infos of VALID


@settings(deadline=None, max_examples=300)
@given(
    flips=st.lists(
        st.tuples(st.integers(0, HEAD_BYTES), st.integers(1, 255)), min_size=1, max_size=4
    )
)
def test_flipped_bytes_raise_nothing_but_a_format_error(folder, flips):
    data = bytearray(VALID)
    for where, bits in flips:
        data[where] ^= bits
    path = write(folder, bytes(data), "flipped.gguf")
    try:
        with GGUFFile(path) as file:
            for name in file.tensors:
                file.data(name)
    except FormatError as error:
        assert str(error).isprintable()


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=200))
def test_noise_is_refused_or_empty(folder, data):
    path = write(folder, b"GGUF\x03\0\0\0" + data, "noise.gguf")
    try:
        GGUFFile(path).close()
    except FormatError as error:
        assert str(error).isprintable()


