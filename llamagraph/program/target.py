"""What a program is planned for. Facts about a machine, not a handle to it."""

from dataclasses import dataclass, replace

from llamagraph.errors import LlamaGraphError


@dataclass(frozen=True)
class Target:
    """The machine facts that choices at planning depend on.

    `shared_per_block` in bytes, as the opt-in limit of one block. `pdl`: programmatic dependent
    launch (sm_90 and later). numpy has no multiprocessors. `tuning` holds what was measured on this
    machine (`scripts/tune`): a matrix, by `kernels.gemv.matrix_key`, with its TEAMS and SPLIT.
    """

    name: str
    n_sm: int = 1
    shared_per_block: int = 0
    pdl: bool = False
    tuning: tuple[tuple[str, int, int], ...] = ()

    @property
    def is_cuda(self) -> bool:
        return self.name.startswith("sm_")

    def with_sm(self, n_sm: int, shared_per_block: int) -> "Target":
        """This architecture with the counts of a real device."""
        return replace(self, n_sm=n_sm, shared_per_block=shared_per_block)


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


def target_named(name: str) -> Target:
    """The target of that name; LlamaGraphError names the known ones."""
    if name not in TARGETS:
        raise LlamaGraphError(f"unknown target {name!r}; there are {', '.join(TARGETS)}")
    return TARGETS[name]
