"""README and docs/: links lead somewhere, code runs, and README is a page that can be read at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import patchconv_native as pc

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "bench" / "NOTES.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?```python\n(.*?)```", re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names that a code host gives to a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), f"{name_of(page)}: nothing at {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)}: no heading for {link}"


def test_every_page_can_be_reached() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "guide.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"({page.name})" in text or f"(docs/{page.name})" in text, f"no link to {page.name}"


def test_every_results_file_is_explained() -> None:
    text = (ROOT / "docs" / "measurements.md").read_text()
    for file in (ROOT / "bench" / "results").glob("*.md"):
        assert f"bench/results/{file.name}" in text, f"docs/measurements.md does not name {file.name}"


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    assert "make demo" in "\n".join(lines) and "make test" in "\n".join(lines)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/guide.md", "docs/memory.md", "docs/several-devices.md", "docs/tile.md"]
)
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of a page, one after another; large pictures are made small."""
    text = (ROOT / page).read_text()
    if "torchvision" in text:
        pytest.importorskip("torchvision")
    monkeypatch.chdir(tmp_path)
    settings = pc.workspace_limit(), pc.backend(), pc.recompute()
    names: dict[str, object] = {"__name__": page}
    blocks = BLOCK.findall(text)
    assert blocks
    for not_run, code in blocks:
        for large, small in SMALL.items():
            code = code.replace(large, small)
        compiled = compile(code, page, "exec")
        if not not_run:
            exec(compiled, names)
    assert (pc.workspace_limit(), pc.backend(), pc.recompute()) == settings
    assert torch.is_grad_enabled()


# What pages say, and what a test has time for.
SMALL = {
    "torchvision.models.resnet18()": "torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])",
    "torch.randn(4, 3, 224, 224)": "torch.randn(2, 3, 64, 64)",
    "torch.randn(16, 3, 224, 224)": "torch.randn(16, 3, 128, 128)",
    "torch.randn(1, 3, 512, 512)": "torch.randn(1, 3, 256, 256)",
    "frontier=True)": "frontier=True, tiles=False)",
    "torch.randn(1, 3, 2048, 2048)": "torch.randn(1, 3, 64, 64)",
    'budget="270MiB"': 'budget="98MiB"',
    'x, budget="2GiB"': 'x, budget="120MiB"',
    'budget="32MiB"': 'budget="8MiB"',
    'budget="128MiB"': 'budget="40MiB"',
}
