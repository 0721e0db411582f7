"""Fetching: whole and verified or not at all, with pip itself and with a stand-in for the hub."""

import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from llamagraph.errors import LlamaGraphError
from llamagraph.gguf import cache_folder, default_model, hf_model
from llamagraph.gguf.hub import DEFAULT_MODEL, PipModel

CONTENT = b"GGUF" + bytes(range(256)) * 9000  # more than two of the blocks it is copied in
MODEL = PipModel(
    label="Tiny",
    file="tiny.gguf",
    n_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    requirement="tiny-model==1.0",
    wheel_bytes=3000,
)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LLAMAGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that the real pip takes for its index, with the tiny model's package in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "tiny_model-1.0.dist-info"
    members = {
        "tiny_model/model.gguf": CONTENT,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def line_of(call, *args, **kwargs) -> str:
    with pytest.raises(LlamaGraphError) as caught:
        call(*args, **kwargs)
    assert str(caught.value).isprintable()
    return str(caught.value)


def script(body: str) -> list[str]:
    """A command that stands in for `python -m pip`."""
    return [sys.executable, "-c", textwrap.dedent(body)]


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMAGRAPH_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("LLAMAGRAPH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert cache_folder() == tmp_path / "llamagraph"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LOCALAPPDATA")
    assert cache_folder() == Path.home() / ".cache" / "llamagraph"


def test_a_model_is_fetched_once_through_pip(cache, index):
    steps = []
    path = default_model(progress=lambda *step: steps.append(step), model=MODEL)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    labels = list(dict.fromkeys(label for label, _, _ in steps))
    assert labels == ["Fetching Tiny", "Unpacking Tiny"]
    assert all(0 <= done <= total for _, done, total in steps)
    assert ("Fetching Tiny", 3000, 3000) in steps
    assert steps[-1] == ("Unpacking Tiny", len(CONTENT), len(CONTENT))
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert default_model(model=MODEL) == default_model(offline=True, model=MODEL) == path


def test_an_absent_package_is_named(cache, index):
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    line = line_of(default_model, model=MODEL)
    assert "Tiny could not be fetched (No matching distribution found for tiny-model==1.0)" in line
    assert list(cache.iterdir()) == []


def test_another_content_is_refused(cache, index):
    model = PipModel(**{**vars(MODEL), "sha256": "0" * 64})
    line = line_of(default_model, model=model)
    assert MODEL.sha256 in line and "0" * 64 in line
    assert list(cache.iterdir()) == []


def test_a_file_of_another_size_is_fetched_again(cache, index):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(CONTENT[:100])
    assert default_model(model=MODEL).read_bytes() == CONTENT


def test_offline_forbids_fetching(cache):
    line = line_of(default_model, offline=True)
    assert line.startswith(f"{cache / DEFAULT_MODEL.file}: ") and "--offline" in line
    assert not cache.exists()


def test_a_python_without_pip_is_helped(cache):
    without_packages = [sys.executable, "-I", "-S", "-m", "pip"]
    line = line_of(default_model, model=MODEL, pip=without_packages)
    assert "-m FILE" in line and "-hf USER/MODEL" in line and "-m ensurepip" in line


def test_a_cache_folder_that_cannot_be_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLAMAGRAPH_CACHE", str(tmp_path / "file" / "cache"))
    line = line_of(default_model, model=MODEL)
    assert str(tmp_path / "file") in line and "LLAMAGRAPH_CACHE" in line


def test_progress_follows_what_pip_writes(cache):
    pip = script(
        """
        import pathlib, sys, tempfile, time
        part = pathlib.Path(tempfile.gettempdir()) / "part"
        part.write_bytes(bytes(1000))
        while not part.with_name("seen").exists():
            time.sleep(0.01)
        sys.exit("ERROR: cut")
        """,
    )
    seen = []

    def progress(label: str, done: int, total: int) -> None:
        if done >= 1000:
            seen.append((label, done, total))
            (next(cache.glob(".fetch-*")) / "pip" / "seen").touch()

    assert "Tiny could not be fetched (cut)" in line_of(
        default_model, progress=progress, model=MODEL, pip=pip
    )
    assert seen[0] == ("Fetching Tiny", 1000, 3000)


def test_an_interrupt_leaves_nothing_behind(cache):
    pip = script(
        """
        import os, pathlib, tempfile, time
        pathlib.Path(tempfile.gettempdir(), "pid").write_text(str(os.getpid()))
        time.sleep(600)
        """,
    )
    pids = []

    def progress(label: str, done: int, total: int) -> None:
        for file in cache.glob(".fetch-*/pip/pid"):
            if text := file.read_text():
                pids.append(int(text))
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        default_model(progress=progress, model=MODEL, pip=pip)
    assert list(cache.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_two_processes_may_fetch_at_once(cache, index):
    code = f"from llamagraph.gguf.hub import *; print(default_model(model={MODEL!r}))"
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].strip() for process in both]
    assert outputs == [str(cache / "tiny.gguf")] * 2
    assert [file.name for file in cache.iterdir()] == ["tiny.gguf"]
    assert (cache / "tiny.gguf").read_bytes() == CONTENT


class Hub:
    """Repositories in a folder, with those functions of `huggingface_hub` that are used."""

    def __init__(self, root: Path, online: bool = True) -> None:
        self.root, self.online = root, online
        self.fetched: list[str] = []

    def add(self, repo: str, *files: str) -> None:
        for file in files:
            path = self.root / repo / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file)

    def list_repo_files(self, repo: str) -> list[str]:
        if not self.online:
            raise ConnectionError("no network\nmore")
        if not (self.root / repo).is_dir():
            raise ValueError(f"404: {repo}")
        files = (self.root / repo).rglob("*.*")
        return sorted(path.relative_to(self.root / repo).as_posix() for path in files)

    def snapshot_download(self, repo: str, local_files_only: bool) -> str:
        assert local_files_only
        if not (self.root / repo).is_dir():
            raise FileNotFoundError("not in the cache")
        return str(self.root / repo)

    def hf_hub_download(self, repo: str, file: str, local_files_only: bool) -> str:
        assert local_files_only or self.online
        if not (self.root / repo / file).is_file():
            raise FileNotFoundError(f"{file} is not there")
        self.fetched.append(file)
        return str(self.root / repo / file)


@pytest.fixture
def hub(tmp_path):
    hub = Hub(tmp_path / "hub")
    hub.add(
        "u/m",
        "README.md",
        "M-Q4_K_M.gguf",
        "M-UD-Q4_K_XL.gguf",
        "M-Q4_K_S.gguf",
        "M-q8_0.gguf",
        "mmproj-M-F16.gguf",
        "BF16/M-BF16-00001-of-00002.gguf",
        "BF16/M-BF16-00002-of-00002.gguf",
    )
    hub.add("u/small", "z.gguf", "a-F16.gguf")
    return hub


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("u/m", "M-Q4_K_M.gguf"),
        ("u/m:q4_k_m", "M-Q4_K_M.gguf"),
        ("u/m:Q8_0", "M-q8_0.gguf"),
        ("u/m:UD-Q4_K_XL", "M-UD-Q4_K_XL.gguf"),
        ("u/small", "z.gguf"),
        ("u/small:f16", "a-F16.gguf"),
    ],
)
@pytest.mark.parametrize("offline", [False, True])
def test_a_quant_names_a_file(hub, name, file, offline):
    path = hf_model(name, offline=offline, hub=hub)
    assert path.read_text() == file
    assert hub.fetched == [file]


def test_all_parts_are_fetched_and_the_first_returned(hub):
    parts = [f"BF16/M-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]
    for path in (hf_model("u/m:bf16", hub=hub), hf_model("u/m", parts[0], hub=hub)):
        assert path.read_text() == parts[0]
    assert hub.fetched == parts * 2
    (hub.root / "u/m" / parts[1]).unlink()
    assert "00002-of-00002.gguf is not there" in line_of(hf_model, "u/m:bf16", hub=hub)


def test_what_is_not_there_is_named(hub):
    line = line_of(hf_model, "u/m:Q4_K", hub=hub)
    assert line.startswith("-hf u/m: no Q4_K; there is M-q8_0.gguf, M-Q4_K_M.gguf, ")
    assert "mmproj" not in line and "00002-of-" not in line
    assert "no x.gguf; there is" in line_of(hf_model, "u/m", "x.gguf", hub=hub)
    assert "404: u/absent" in line_of(hf_model, "u/absent", hub=hub)
    hub.add("u/none", "README.md")
    assert "there is no .gguf file" in line_of(hf_model, "u/none", hub=hub)


@pytest.mark.parametrize("name", ["m", "u/", "/m", "u/m/x", ":Q4_0"])
def test_a_name_must_be_user_and_model(hub, name):
    assert "must be USER/MODEL or USER/MODEL:QUANT" in line_of(hf_model, name, hub=hub)


def test_the_network_and_offline_are_told_apart(hub):
    hub.online = False
    assert line_of(hf_model, "u/m", hub=hub) == "-hf u/m: no network"
    assert hf_model("u/m", offline=True, hub=hub).read_text() == "M-Q4_K_M.gguf"
    line = line_of(hf_model, "u/absent", offline=True, hub=hub)
    assert line.startswith("-hf u/absent: is not whole in ") and "--offline" in line


def test_without_huggingface_hub_the_install_command_is_given():
    code = "from llamagraph.gguf.hub import hf_model; hf_model('u/m')"
    blocked = f"import sys; sys.modules['huggingface_hub'] = None; {code}"
    result = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    assert result.stderr.splitlines()[-1].endswith(
        "-hf needs the huggingface_hub package: pip install 'llamagraph[hub]'"
    )
