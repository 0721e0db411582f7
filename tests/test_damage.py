"""300 damaged files: each is refused in one line, and none makes the reader allocate much."""

import tracemalloc
from collections import Counter

import pytest
from damage import IMPOSTORS, N_FILES, WRONG, damaged_files
from gguf_files import tiny_llama

from llamagraph.errors import FormatError
from llamagraph.gguf import GGUFFile

VALID = tiny_llama()
MOST_BYTES = 8 << 20


@pytest.fixture(scope="module")
def damaged():
    return list(damaged_files(0, VALID))


def test_the_valid_file_is_valid(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(VALID)
    with GGUFFile(path) as file:
        assert (len(file.metadata), len(file.tensors)) == (19, 20)


def test_every_damaged_file_is_refused_in_one_line(damaged, tmp_path):
    path = tmp_path / "model.gguf"
    for label, data in damaged:
        path.write_bytes(data)
        tracemalloc.start()
        try:
            GGUFFile(path).close()
        except FormatError as error:
            line = str(error)
            assert line.startswith(f"{path}: ") and line.isprintable() and len(line) < 500, label
        else:
            assert label.startswith("model: "), label
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < MOST_BYTES, label


def test_the_damage_is_of_every_kind_and_repeatable(damaged):
    assert len({data for _, data in damaged} - {VALID}) == N_FILES
    assert damaged == list(damaged_files(0, VALID))
    assert damaged[len(IMPOSTORS) :] != list(damaged_files(1, VALID))[len(IMPOSTORS) :]
    kinds = Counter(label.split(":")[0] for label, _ in damaged)
    assert kinds["reader"] > 200 and kinds["model"] > 50
    labels = "\n".join(label for label, _ in damaged)
    for what in WRONG:
        assert f"reader: {what} of" in labels
    for what in ("cut at byte", "twice", "a tensor name is", "is a float"):
        assert what in labels
