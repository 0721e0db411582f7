"""Files that take another one's place: what stays, and what is never replaced."""

import os

import pytest

from llamagraph.errors import LlamaGraphError
from llamagraph.files import replacing


def write(path, data=b"new"):
    with replacing(path) as out:
        out.write(data)


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "f"
    write(path, b"old")
    with pytest.raises(ZeroDivisionError), replacing(path) as out:
        out.write(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    write(path)
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["f"]


def test_a_link_stays_one(tmp_path):
    path, link = tmp_path / "f", tmp_path / "link"
    path.write_bytes(b"old")
    link.symlink_to(path)
    write(link)
    assert link.is_symlink() and path.read_bytes() == b"new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_what_is_no_file_is_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name in ("pipe", ".", "circle", "missing/f", "a" * 300, "a\0b"):
        with pytest.raises(LlamaGraphError, match="cannot be written: ") as raised:
            write(tmp_path / name)
        assert "\n" not in str(raised.value), name
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(LlamaGraphError, match="is not a file"):
        write(tmp_path / "pipe")
