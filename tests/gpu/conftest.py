"""The GPU of the machine, opened once; without one every test here is skipped with the reason."""

import pathlib
import sys

import pytest

from llamagraph.devices import open_device
from llamagraph.errors import DeviceError

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))


@pytest.fixture(scope="session")
def gpu():
    try:
        device = open_device("cuda", warn=print)
    except DeviceError as error:
        pytest.skip(str(error))
    device.memory.reserve("scratch", 1 << 32)
    yield device
    device.close()
