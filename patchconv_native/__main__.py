"""The command line: `python -m patchconv_native COMMAND`.

A command is a module with a docstring, `add_arguments(parser)` and `run(arguments) -> exit code`; one line in
COMMANDS makes it known. Modules are imported for their help text, so they import nothing but torch's package
and the standard library until they run. Exit codes: 0 done, 1 failed while working, 2 asked for something
impossible.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType

from . import demo, info

PROGRAM = "python -m patchconv_native"
COMMANDS: dict[str, ModuleType] = {"info": info, "demo": demo}


def parser() -> argparse.ArgumentParser:
    """The whole command line; a command's help is its module's docstring."""
    top = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Exact convolutions for PyTorch in the memory of their input and output alone.",
        epilog=f"`{PROGRAM} COMMAND --help` explains a command.",
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        text = inspect.getdoc(module) or ""
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, name=name)
    return top


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; mistakes in the words themselves exit with code 2."""
    arguments = parser().parse_args(words)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        print(f"\n{PROGRAM} {arguments.name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
