"""Made-up traces of memory: a ResNet-18-like model, what is checkpointed, unfinished, empty, hostile or huge."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from patchconv_native.memory.records import Held, ModuleFacts, Peak, Stretch, Trace

MIB = 2**20
HOSTILE = "</script><script>window.broken = 1</script>\"'&<b>\u2028|`*"


@dataclass
class _Run:
    """A step that is made up: memory goes up and down, stays and the highest moment are recorded as a trace does."""

    scale: float = 1.0
    operators: bool = False
    now: float = 0.0
    held: int = 0
    top: int = 0
    peak: tuple[int, float, str, str, str] = (0, 0.0, "", "", "")
    curve: list[tuple[float, int]] = field(default_factory=list)
    modules: dict[str, ModuleFacts] = field(default_factory=dict)
    phase: str = "forward"
    open: list[Stretch] = field(default_factory=list)

    def change(self, amount: int, name: str, operator: str, takes: float) -> None:
        self.now += 1 if self.operators else takes
        self.held += amount
        self.curve.append((self.now, self.held))
        for stay in self.open:
            stay.peak = max(stay.peak, self.held)
        if self.held > self.peak[0]:
            self.peak = (self.held, self.now, name, operator, self.phase)

    def enter(self, name: str | None, phase: str) -> Stretch:
        stay = Stretch(phase, self.now, self.now, self.held, self.held, self.held)
        self.open.append(stay)
        if name is not None:
            self.modules[name].stretches.append(stay)
        return stay

    def leave(self) -> Stretch:
        stay = self.open.pop()
        stay.stop, stay.after = self.now, self.held
        return stay

    def leaf(self, name: str, phase: str, kept: int, operator: str) -> None:
        takes = 1e-4 + kept * 2e-11
        workspace = kept // 3 if "conv" in operator else 0
        self.enter(name, phase)
        if workspace:
            self.change(workspace, name, operator, takes)
        self.change(kept - workspace if phase != "backward" else -kept - workspace, name, operator, takes)
        if phase == "backward":
            self.change(self.modules[name].parameters, name, "aten::add_", takes)
        self.leave()


def _blocks() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Names and types: the parts of the model and their leaves."""
    basic = [("conv1", "Conv2d"), ("bn1", "BatchNorm2d"), ("relu", "ReLU"), ("conv2", "Conv2d"), ("bn2", "BatchNorm2d")]
    found: list[tuple[str, str, list[tuple[str, str]]]] = [("", "ResNet", [])]
    for stem, kind in (("conv1", "Conv2d"), ("bn1", "BatchNorm2d"), ("relu", "ReLU"), ("maxpool", "MaxPool2d")):
        found.append((stem, kind, []))
    for layer in range(1, 5):
        found.append((f"layer{layer}", "Sequential", []))
        for block in range(2):
            leaves = [(f"layer{layer}.{block}.{name}", kind) for name, kind in basic]
            found.append((f"layer{layer}.{block}", "BasicBlock", leaves))
    return [*found, ("avgpool", "AdaptiveAvgPool2d", []), ("fc", "Linear", [])]


OPERATORS = {"Conv2d": "aten::convolution", "BatchNorm2d": "aten::native_batch_norm", "ReLU": "aten::relu"}


def resnet(scale: float = 1.0, fake=False, checkpoint=False, error: str | None = None, noise: int = 6) -> Trace:
    """A training step of a ResNet-18-like model; `scale` of its activations, its blocks checkpointed if so."""
    draw = random.Random(0)
    run = _Run(operators=fake)
    tree = _blocks()
    for name, kind, leaves in tree:
        for one, what in [(name, kind), *leaves]:
            run.modules[one] = ModuleFacts(one, what)
    static = {"parameters": 45 * MIB, "buffers": MIB, "gradients": 0, "optimizer": 90 * MIB, "inputs": 12 * MIB}
    run.held = sum(static.values())
    run.curve.append((0.0, run.held))
    phases = []
    leaves = [(name, kind) for name, kind, inside in tree if not inside and kind not in ("ResNet", "Sequential")]
    for name, _, inside in tree:
        leaves += inside if name else []
    sizes = {}
    ends = 0.62 if error else 1.0
    order = [name for name in run.modules if name]
    reached = set(order[: int(len(order) * ends)])
    for name, kind in leaves:
        level = int(name[5]) if name.startswith("layer") else 0
        kept = int(scale * MIB * (98 if not level else 49) / 2 ** max(level - 1, 0) * (1.0 if kind != "ReLU" else 0.25))
        sizes[name] = max(kept, 4096) if name not in ("avgpool", "fc") else 4096
        facts = run.modules[name]
        facts.parameters = {"Conv2d": 4**level * 9 * 4096 or 37632, "BatchNorm2d": 512, "Linear": 2 * MIB}.get(kind, 0)
        facts.gradients, facts.optimizer = facts.parameters, 2 * facts.parameters
        if name not in reached:
            continue
        facts.saved = facts.own_saved = sizes[name] // (50 if checkpoint and name.count(".") == 2 else 1)
        facts.saved_by = {OPERATORS.get(kind, f"aten::{kind.lower()}"): facts.saved}
    outer = [facts for facts in run.modules.values() if facts.name not in sizes]
    for facts in reversed(outer):
        prefix = facts.name + "." if facts.name else ""
        for name, _ in leaves:
            if name.startswith(prefix):
                inner = run.modules[name]
                facts.parameters += inner.parameters
                facts.gradients += inner.gradients
                facts.optimizer += inner.optimizer
                facts.saved += inner.saved
                for operator, count in inner.saved_by.items():
                    facts.saved_by[operator] = facts.saved_by.get(operator, 0) + count

    def walk(phase: str, names: list[str], prefix: str = "") -> None:
        """Enters every module in `names` whose parent is `prefix`, and what is in it."""
        for name in names:
            if name.rpartition(".")[0] != prefix:
                continue
            if any(one.startswith(name + ".") for one in names):
                if checkpoint and phase == "backward" and name.count(".") == 1:
                    run.enter(name, "recompute")
                    walk("recompute", [*reversed(names)], name)
                    run.leave()
                run.enter(name, phase)
                walk(phase, names, name)
                run.leave()
                continue
            inside = checkpoint and name.count(".") == 2
            kept = sizes[name] // 50 if inside and phase == "forward" else sizes[name]
            run.leaf(name, phase, kept, next(iter(run.modules[name].saved_by)))
            for _ in range(noise):
                wave = draw.randrange(1, 2 * MIB)
                run.change(wave, name, "aten::empty", 2e-5)
                run.change(-wave, name, "aten::empty", 2e-5)

    whole = run.enter(None, "forward")
    run.enter("", "forward")
    walk("forward", [name for name in order if name in reached])
    run.leave()
    phases.append(whole)
    run.leave()
    if not error:
        run.phase = "backward"
        phases.append(run.enter(None, "backward"))
        run.enter("", "backward")
        walk("backward", order[::-1])
        run.leave()
        run.leave()
        run.phase = "optimizer"
        phases.append(run.enter(None, "optimizer"))
        for _ in range(12):
            run.change(4 * MIB, "", "aten::_foreach_add_", 3e-4)
            run.change(-4 * MIB, "", "aten::_foreach_add_", 3e-4)
        run.leave()
    count, time, module, operator, phase = run.peak
    held = [Held("", "(before the step)", "", run.curve[0][1], 1)]
    kept = ((name, size) for name, size in sizes.items() if name in reached)
    held += [Held(name, next(iter(run.modules[name].saved_by)), "forward", size, 2) for name, size in kept]
    held.sort(key=lambda one: (-one.bytes, one.module))
    return Trace(
        title="ResNet-18, 8 images of 448 × 448, SGD with momentum", device="cuda" if fake else "NVIDIA H100",
        fake=fake, clock="operators" if fake else "seconds", amp="bfloat16" if checkpoint else None, static=static,
        after={} if error else {**static, "gradients": 45 * MIB}, phases=phases, modules=list(run.modules.values()),
        curve=run.curve, peak=Peak(count, time, module, operator, phase, held), duration=run.now, error=error,
        saved=run.modules[""].saved + (0 if error else 3 * MIB),
        notes=["Memory of cuDNN's handle, 8 MiB, is not counted."],
    )  # fmt: skip


OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 49.00 MiB. <GPU 0>\n  at layer3.0.conv2"


def empty() -> Trace:
    """Nothing: a step without modules, memory or time."""
    return Trace("", "cpu", False, "seconds", None, {}, {}, [], [], [], Peak(0, 0.0, "", "", ""), 0, 0.0)


def hostile() -> Trace:
    """Names that would break a page, a table or a console that takes them for more than text."""
    trace = resnet()
    for facts in trace.modules:
        facts.name = facts.name.replace("layer1", f"[bold]{HOSTILE}")
        facts.type = facts.type.replace("BasicBlock", f"Block[{HOSTILE}]")
        facts.saved_by = {operator.replace("aten", HOSTILE): count for operator, count in facts.saved_by.items()}
    trace.title = trace.device = trace.amp = trace.error = f"[red]{HOSTILE}"
    trace.notes = [HOSTILE]
    trace.phases[-1].phase = HOSTILE
    for one in trace.peak.held:
        one.module, one.operator, one.phase = (HOSTILE + word for word in (one.module, one.operator, one.phase))
    trace.peak.module = trace.peak.operator = HOSTILE
    return trace


def huge(modules: int = 2000, stays: int = 20000, points: int = 200000) -> Trace:
    """As large as a trace gets: four levels of modules with long names, many calls, a long curve."""
    draw = random.Random(1)
    trace = empty()
    trace.title, trace.duration = "huge", 100.0
    trace.static = trace.after = {"parameters": MIB}
    names = [""]
    while len(names) < modules:
        parent = names[draw.randrange(max(len(names) // 4, 1))]
        names.append(f"{parent}.block_number_{len(names)}".lstrip("."))
    kind = "TransformerEncoderLayer"
    trace.modules = [ModuleFacts(name, kind, 10**7, saved=10**6, own_saved=10**5) for name in names]
    for index in range(stays):
        start = 100 * index / stays
        stay = Stretch(("forward", "backward")[index * 2 // stays], start, start + 0.3, 10**6, 10**6, 2 * 10**6)
        trace.modules[draw.randrange(modules)].stretches.append(stay)
    trace.curve = [(100 * i / points, draw.randrange(10**9)) for i in range(points)]
    trace.curve[points // 3] = (trace.curve[points // 3][0], 10**10)
    trace.peak = Peak(10**10, trace.curve[points // 3][0], names[7], "aten::mm", "forward")
    trace.peak.held = [Held(names[i % modules], "aten::mm", "forward", 10**6 + i, 1) for i in range(5000)]
    return trace


TRACES: dict[str, Callable[[], Trace]] = {
    "resnet": resnet, "fake": lambda: resnet(fake=True), "checkpointed": lambda: resnet(checkpoint=True),
    "unfinished": lambda: resnet(error=OUT_OF_MEMORY), "empty": empty, "hostile": hostile,
}  # fmt: skip
