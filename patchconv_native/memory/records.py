"""What a trace of one step found: plain data, in bytes and on one clock. `trace` fills it, `report` and `plot` show it.

Bytes are of everything that is counted: what was there before the step (`static`) and what the step allocated. The
clock is seconds since the step began; of a step with fake tensors, which computes nothing, it is the number of the
operator.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PHASES = ("forward", "backward", "recompute", "optimizer")
"""Of a stretch. "recompute" is a forward pass inside of backward: what a checkpoint runs again."""


@dataclass
class Stretch:
    """One stay in a module, or in a phase of the whole step."""

    phase: str
    start: float
    stop: float
    before: int
    after: int
    peak: int
    """The most inside of it, workspaces of operators included."""


@dataclass
class ModuleFacts:
    """One module, with all that is inside of it."""

    name: str
    """As in named_modules(): "" is the model itself."""
    type: str
    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Of its parameters' state."""
    saved: int = 0
    """Kept for backward by what ran inside of it, each memory once, where it was saved first. Without parameters."""
    saved_by: dict[str, int] = field(default_factory=dict)
    """The same by the operator that saved it, such as "aten::convolution"."""
    own_saved: int = 0
    """Of `saved`, what was saved by this module's own code, not by modules inside of it."""
    stretches: list[Stretch] = field(default_factory=list)
    """In order of time. A module can be called several times, and can be in backward several times a call."""

    def peak(self, phase: str) -> int | None:
        """The most inside of it in a phase; None where it had none."""
        return max((s.peak for s in self.stretches if s.phase == phase), default=None)


@dataclass
class Held:
    """Memory alive at the peak, by who allocated it."""

    module: str
    operator: str
    """"(before the step)" for what was there already."""
    phase: str
    bytes: int
    count: int


@dataclass
class Peak:
    """The highest moment of the step."""

    bytes: int
    time: float
    module: str
    """The innermost one at work then; "" may also be the step's own code."""
    operator: str
    phase: str
    held: list[Held] = field(default_factory=list)
    """What was alive, largest first."""


@dataclass
class Trace:
    """One step of one model."""

    title: str
    device: str
    fake: bool
    clock: str
    """"seconds" or "operators"."""
    amp: str | None
    """The dtype of autocast."""
    static: dict[str, int]
    """What was there before the step: "parameters", "buffers", "gradients", "optimizer", "inputs", "other"."""
    after: dict[str, int]
    """What there is when it is over, by the same names."""
    phases: list[Stretch]
    """Of the whole step: forward, backward, optimizer, as far as it came."""
    modules: list[ModuleFacts]
    """In the order of named_modules()."""
    curve: list[tuple[float, int]]
    """Time and bytes, at every change."""
    peak: Peak
    saved: int
    """Kept for backward in all: the model's `saved` and what code around it (a loss) saved."""
    duration: float
    """Of the step, on the clock."""
    work: dict[str, int] = field(default_factory=dict)
    """Of a fake step: "flops" of all operators, and the "bytes" that they read and write."""
    notes: list[str] = field(default_factory=list)
    """What the reader should know: what was not counted, say."""
    error: str | None = None
    """Of a step that was not finished (out of memory)."""
