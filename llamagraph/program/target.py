"""What a program is planned for. Facts about a machine, not a handle to it."""

from dataclasses import dataclass, replace

from llamagraph.errors import LlamaGraphError


@dataclass(frozen=True)
class Target:
    """The machine facts that choices at planning depend on.

    `shared_per_block` in bytes, as the opt-in limit of one block. `pdl`: programmatic dependent
    launch (sm_90 and later). numpy has no multiprocessors. `tuning` holds what was measured on this
    machine (`scripts/tune`): a matrix, by `kernels.gemv.matrix_key`, with its TEAMS and SPLIT.
    `l2_persist` bytes of the L2 cache are set aside for what launches ask it to keep, of ranges of
    up to `l2_window` bytes; 0 where nothing is.
    """

    name: str
    n_sm: int = 1
    shared_per_block: int = 0
    pdl: bool = False
    tuning: tuple[tuple[str, int, int], ...] = ()
    l2_persist: int = 0
    l2_window: int = 0

    @property
    def capability(self) -> int:
        """90 for sm_90a; 0 for numpy."""
        return capability_of(self.name)

    @property
    def is_cuda(self) -> bool:
        return self.name.startswith("sm_")

    def with_sm(self, n_sm: int, shared_per_block: int) -> "Target":
        """This architecture with the counts of a real device."""
        return replace(self, n_sm=n_sm, shared_per_block=shared_per_block)

    def planned_as(self, chosen: "Target") -> "Target":
        """The choices of `chosen` with the counts of this machine."""
        return replace(chosen, n_sm=self.n_sm, shared_per_block=self.shared_per_block,
                       l2_persist=self.l2_persist, l2_window=self.l2_window)

    def persisting(self, l2_persist: int, l2_window: int) -> "Target":
        """This target with so much of its L2 cache set aside."""
        return replace(self, l2_persist=l2_persist, l2_window=l2_window)


def capability_of(arch: str) -> int:
    """The number in an architecture's name; 0 where there is none."""
    return int("".join(c for c in arch if c.isdigit()) or 0)


# Shared memory limits: CUDA C++ Programming Guide, table of technical specifications per compute
# capability. SM counts are those of a usual card of the architecture.
TARGETS = {
    t.name: t
    for t in (
        Target("numpy"),
        Target("sm_75", 40, 65536),
        Target("sm_80", 108, 166912),
        Target("sm_86", 82, 101376),
        Target("sm_89", 128, 101376),
        Target("sm_90a", 132, 232448, pdl=True),
        Target("sm_100", 148, 232448, pdl=True),
        Target("sm_120", 170, 101376, pdl=True),
    )
}

# Bytes of L2 that may be set aside, and the longest range: as an A100 (40 MB) and an H200 (60 MB)
# answer CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE and ..._MAX_ACCESS_POLICY_WINDOW_SIZE.
L2_PERSIST = {"sm_80": 30 << 20, "sm_90a": 39_321_600}
L2_WINDOW = 134_213_632


def target_named(name: str, persist: bool = False) -> Target:
    """The target of that name; LlamaGraphError names the known ones.

    With `persist` L2 is set aside, as far as a usual card of the architecture is known.
    """
    if name not in TARGETS:
        raise LlamaGraphError(f"unknown target {name!r}; there are {', '.join(TARGETS)}")
    target = TARGETS[name]
    if persist and name in L2_PERSIST:
        return target.persisting(L2_PERSIST[name], L2_WINDOW)
    return target
