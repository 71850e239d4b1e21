"""The result of tracing one step, as plain data. `trace` fills it; the reports and figures read it.

Numbers are bytes in use at a time: what was there before the step (`static`) and what the step allocated. The clock is
seconds since the step began. With fake tensors nothing is computed, and the clock counts operators instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PHASES = ("forward", "backward", "recompute", "optimizer")
"""Phases of a stretch. "recompute" is a forward pass inside the backward pass, as a checkpoint runs it."""


@dataclass
class Stretch:
    """The time from entering a module, or a phase of the whole step, to leaving it."""

    phase: str
    start: float
    stop: float
    before: int
    after: int
    peak: int
    """The highest value in between, with the workspaces of operators."""


@dataclass
class ModuleFacts:
    """One module with everything inside it."""

    name: str
    """Its name in named_modules(). "" is the model itself."""
    type: str
    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Bytes of the optimizer's state for its parameters."""
    saved: int = 0
    """Bytes saved for backward by what ran inside it, without parameters. A storage counts once, where first saved."""
    saved_by: dict[str, int] = field(default_factory=dict)
    """The same bytes by the operator that saved them, such as "aten::convolution"."""
    own_saved: int = 0
    """The part of `saved` that this module's own code saved, not the modules inside it."""
    stretches: list[Stretch] = field(default_factory=list)
    """In order of time. A module may be called several times, and one call may have several stretches in backward."""

    def peak(self, phase: str) -> int | None:
        """The highest value inside it in a phase. None if it was not in that phase."""
        return max((s.peak for s in self.stretches if s.phase == phase), default=None)


@dataclass
class Held:
    """Memory in use at the peak, grouped by what allocated it."""

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
    """The innermost one that was running. "" is the model itself or the code of the step around it."""
    operator: str
    phase: str
    held: list[Held] = field(default_factory=list)
    """The memory in use, largest first."""


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
    """Bytes before the step: "parameters", "buffers", "gradients", "optimizer", "inputs", "other"."""
    after: dict[str, int]
    """Bytes after the step, by the same names."""
    phases: list[Stretch]
    """The whole step: forward, backward, optimizer, as far as it came."""
    modules: list[ModuleFacts]
    """In the order of named_modules()."""
    curve: list[tuple[float, int]]
    """Time and bytes in use, at every change."""
    peak: Peak
    saved: int
    """Bytes saved for backward in all: by the model, and by code around it such as a loss."""
    duration: float
    """Length of the step on the clock."""
    work: dict[str, int] = field(default_factory=dict)
    """Of a fake step: the "flops" of all operators, and the "bytes" that they read and write."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the reader, for instance what was not counted."""
    error: str | None = None
    """The error that ended an unfinished step, such as out of memory."""
