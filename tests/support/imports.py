"""What the modules of patchconv_native import of each other, read from their sources: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "patchconv_native"


@cache
def modules() -> dict[str, Path]:
    """Every module of the package, by its full name. A package has the name of its folder."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


def _from(module: str, node: ast.ImportFrom) -> str:
    """The full name of what `from ... import` names in a module."""
    source = node.module or ""
    if not node.level:
        return source
    inside = module.split(".") + [""] * (modules()[module].name == "__init__.py")
    return ".".join([*inside[: len(inside) - node.level], *([source] if source else [])])


def statements(module: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every import in a module, also inside functions. The name is empty in `import module`."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((_from(module, node), alias.name) for alias in node.names)


def source_of(module: str, name: str) -> str:
    """The module that `from module import name` reads: a submodule, or where a package has the name from."""
    if f"{module}.{name}" in modules():
        return f"{module}.{name}"
    if modules()[module].name == "__init__.py":
        for node in tree(module).body:
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if name == (alias.asname or alias.name) and _from(module, node) in modules():
                    return source_of(_from(module, node), alias.name)
    return module


@cache
def imported(module: str) -> frozenset[str]:
    """Modules of the package that a module imports."""
    found = {source_of(source, name) for source, name in statements(module) if source in modules()}
    return frozenset(found - {module})


def reached(module: str) -> set[str]:
    """All that is imported with a module, by it or by what it imports."""
    found, todo = set(), [module]
    while todo:
        for other in imported(todo.pop()) - found:
            found.add(other)
            todo.append(other)
    return found


def circles() -> list[set[str]]:
    """Groups of modules of which each one reaches all others."""
    reach = {module: reached(module) for module in modules()}
    groups = {frozenset({m, *(o for o in reach[m] if m in reach[o])}) for m in reach if m in reach[m]}
    return [set(group) for group in sorted(groups, key=sorted)]
