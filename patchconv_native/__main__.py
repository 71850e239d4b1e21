"""The command line: `python -m patchconv_native COMMAND`, or `patchconv COMMAND`.

A command is a module with a docstring, `add_arguments(parser)` and `run(arguments) -> exit code`, and a line in
COMMANDS. All of them are imported for their help texts, so until they run they import nothing but this package, torch
and the standard library. Exit codes: 0 done, 1 failed while working, 2 wrong arguments, 130 interrupted. An error is
one line on stderr.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from . import demo, info
from .commands import bench, explain, plan, tile, trace
from .commands.errors import Failed, Mistake, near
from .memory.labels import flat

SCRIPT = "patchconv"
PROGRAM = SCRIPT if Path(sys.argv[0]).name == SCRIPT else "python -m patchconv_native"
COMMANDS: dict[str, ModuleType] = {
    "info": info, "trace": trace, "plan": plan, "tile": tile, "explain": explain, "bench": bench, "demo": demo,
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """argparse's parser, with errors of one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-[0-9.]")  # -3GB is a value, which the option's type refuses

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {flat(message)} (--help explains)\n")


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line. A command's help is its module's docstring."""
    top = Parser(
        prog=PROGRAM,
        description="Convolutional networks in less memory, with the same results to rounding.",
        epilog=f"`{PROGRAM} COMMAND --help` explains a command.",
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        text = inspect.getdoc(module) or ""
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text.replace("  patchconv_native ", f"  {PROGRAM} "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, name=name)
    return top


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Wrong arguments exit with code 2."""
    top = parser()
    words = sys.argv[1:] if words is None else words
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        top.error(f"expected a command, {', '.join(COMMANDS)}, got {words[0]!r}{near(words[0], COMMANDS)}")
    arguments, unknown = top.parse_known_args(words)
    if unknown:
        top.prog = f"{PROGRAM} {arguments.name}"
        top.error(f"unrecognized arguments: {' '.join(unknown)}{_near(arguments, unknown[0])}")
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except (Mistake, Failed) as error:
        print(f"patchconv_native {arguments.name}: {flat(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, Mistake) else 1
    except KeyboardInterrupt:
        print(f"\n{PROGRAM} {arguments.name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads the output any more; Python would print an error at exit too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _near(arguments: argparse.Namespace, word: str) -> str:
    known = [f"--{name.replace('_', '-')}" for name in vars(arguments) if name not in ("run", "name", "model")]
    return near(word.partition("=")[0], known)


if __name__ == "__main__":
    sys.exit(main())
