"""What the machine that this process runs on can spare: its memory, and its idle cores."""

import os
import time
from collections.abc import Callable
from pathlib import Path

MOST_THREADS = 8  # of BLAS: a decode step's products are small


def available_memory() -> int:
    """Bytes that this process may still take: the machine's, or its control group's if less."""
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if not meminfo.exists():  # a system that does not say: all of its memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, max(0, int(text) - used + int(stat.get("inactive_file", 0))))
    return free


def running() -> int:
    """Threads on this machine that run or want to, this one among them."""
    stat = Path("/proc/stat").read_text()
    return int(stat.partition("procs_running ")[2].split()[0])


def idle_cores(cores: int, running: Callable[[], int] = running) -> int:
    """How many threads BLAS should have: a core each, and no more than MOST_THREADS.

    Its threads wait for each other without sleeping: one that finds no idle core makes all of them
    many times slower. Looks several times, for 20 ms in all.
    """
    samples = []
    for _ in range(9):
        try:
            samples.append(running())
        except (OSError, IndexError):  # a system that does not say
            return 1
        time.sleep(0.002)
    others = sorted(samples)[len(samples) // 2] - 1
    return max(1, min(cores - others, MOST_THREADS))
