"""Shared fixtures: golden data and real models where they are at hand, else a skip."""

import os
import pathlib
import shutil

import pytest

REPOSITORY = pathlib.Path(__file__).parent.parent
MODEL_FILES = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": "gemma-3-270m-q4_k_m.gguf",
    "qwen": "qwen2.5-coder-0.5b-q4_k_m.gguf",
}


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """The folder of reference data, made with llama.cpp."""
    folder = pathlib.Path(
        os.environ.get("LLAMAGRAPH_GOLDEN", REPOSITORY.parent / "shared" / "golden")
    )
    if not folder.is_dir():
        pytest.skip(f"no golden data at {folder} (set LLAMAGRAPH_GOLDEN)")
    return folder


def find_model(name: str) -> pathlib.Path | None:
    """A real model's file in $LLAMAGRAPH_MODELS; the default model is fetched where it is not."""
    from llamagraph.errors import LlamaGraphError
    from llamagraph.gguf.hub import default_model

    folder = os.environ.get("LLAMAGRAPH_MODELS")
    if folder and (path := pathlib.Path(folder) / MODEL_FILES[name]).is_file():
        return path
    if name != "smollm2":
        return None
    try:
        return default_model()
    except LlamaGraphError:  # no network
        return None


@pytest.fixture(scope="session")
def model_path():
    """A function from a model's short name to its path; skips where the file is absent."""

    def path(name: str) -> pathlib.Path:
        if (found := find_model(name)) is None:
            pytest.skip(f"{MODEL_FILES[name]} is not here (set LLAMAGRAPH_MODELS to its folder)")
        return found

    return path


@pytest.fixture(params=[(1600, 900), (800, 600)], ids=["large", "small"])
def browser(request):
    """A browser at two sizes of its window."""
    from browser import Browser

    if not shutil.which("chromedriver") or not shutil.which("chromium"):
        pytest.skip("chromium and chromedriver are not installed")
    made = Browser(*request.param)
    yield made
    made.close()
