"""The parts of `gpu-check`: each runs on a GPU and adds rows to a report."""
