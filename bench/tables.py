"""Markdown of the reports: sections of text and a table each, under a heading that names the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .measure import MIB

Row = dict[str, Any]
Rows = list[Row]


def verdict(met: bool) -> str:
    return "pass" if met else "FAIL"


def mib(count: float, digits: int = 0) -> str:
    """Bytes as a number of MiB, for a column that names the unit."""
    return f"{count / MIB:.{digits}f}"


def spread(value: dict[str, float] | None, digits: int = 2) -> str:
    """A `measure.Spread`: median (least to most). None is a ratio of a side to itself."""
    if value is None:
        return "1"
    return f"{value['median']:.{digits}f} ({value['least']:.{digits}f} to {value['most']:.{digits}f})"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


@dataclass(frozen=True)
class Section:
    """Any of its parts may be missing. Without rows there is a table if it has a head."""

    text: str = ""
    head: Sequence[str] = ()
    rows: Iterable[Sequence[object]] = ()
    title: str = ""

    def __str__(self) -> str:
        title = f"## {self.title}" if self.title else ""
        return "\n\n".join(filter(None, [title, self.text, table(self.head, self.rows) if self.head else ""]))


def machine(info: dict[str, Any]) -> str:
    """One line that names the hardware and the software."""
    limited = f" (ONEDNN_MAX_CPU_ISA={info['onednn_isa']})" if info.get("onednn_isa") else ""
    parts = [
        f"{info['cpu']}, {info['cores']} cores ({info['threads']} threads, {info['isa']}), {info['memory_gib']} GiB",
        f"torch {info['torch']}, oneDNN {info['onednn']}{limited}, patchconv_native {info['patchconv_native']}, "
        f"patch_conv {info['patch_conv'] or 'not installed'}",
    ]
    if "gpu" in info:
        gpu = f"{info['gpu']} ({info['gpu_memory_gib']} GiB, sm_{info['capability'].replace('.', '')})"
        parts.insert(0, f"{gpu}, CUDA {info['cuda']}, cuDNN {info['cudnn']}, driver {info['driver']}")
    return "; ".join(parts)


def measured(head: dict[str, Any]) -> str:
    """When and on what: `head` is what measure.report_head gives."""
    return f"Measured {head['date']} on {machine(head['hardware'])}. Load before: {head['load']}."


def measured_elsewhere(data: dict[str, Any], case: str) -> str:
    """Of a case that was kept from a run on another machine: when and on what it was measured."""
    head = data.get("heads", {}).get(case, data)
    return "" if head["hardware"] == data["hardware"] else measured(head)


def document(data: dict[str, Any], title: str, sections: Iterable[Section]) -> str:
    notes = measured(data)
    if data["size"] != "full":
        notes += f" **Size {data['size']}: a trial of the script, not a measurement.**"
    return "\n\n".join([f"# {title}", notes, *map(str, sections)]) + "\n"


def targets(
    rows: Rows,
    titles: dict[str, str],
    group: Callable[[Row], str],
    label: Callable[[Row], str],
    value: Callable[[Row, str], float | None],
    at_most: Sequence[str] = (),
) -> Section:
    """For every target of a group of rows: how many rows meet it, and the row that is furthest from it.

    A row holds `targets`, a bound by name, and `met`; one without the figure does not meet its target. `at_most`: the
    targets that are bounds from above.
    """
    groups: dict[tuple[str, str, float], Rows] = {}
    for row in rows:
        for name, bound in row.get("targets", {}).items():
            groups.setdefault((group(row), name, bound), []).append(row)
    lines = []
    for (members_of, name, bound), members in groups.items():
        met = sum(row.get("met", {}).get(name, False) for row in members)
        known = [(found, row) for row in members if (found := value(row, name)) is not None]
        choose = max if name in at_most else min
        worst = choose(known, key=lambda pair: pair[0], default=None)
        furthest = f"{worst[0]:.2f} ({label(worst[1])})" if worst else "not measured"
        sign = "<=" if name in at_most else ">="
        counts = f"{met} of {len(members)}"
        lines.append([members_of, titles[name], f"{sign} {bound:g}", counts, furthest, verdict(met == len(members))])
    failed = [row for row in rows if "error" in row]
    if failed:
        what = f"{label(failed[0])}: {failed[0]['error']}"
        lines.append(["", "rows without a measurement", "0", str(len(failed)), what, verdict(False)])
    return Section(head=["of", "figure", "target", "rows that meet it", "furthest from it", ""], rows=lines)
