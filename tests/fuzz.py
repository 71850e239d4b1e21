"""Random configurations for as long as one likes: the checks of tests/conv/test_conv_sweep.py without its limit.

    python tests/fuzz.py --n 20000 [--seed 7] [--device cuda] [--dims 2] [--transposed yes|no]
    python tests/fuzz.py --replay "Configuration(transposed=False, batch=2, ...)"

Configuration number i of a seed does not depend on the others, so a run can be cut short and continued with
--first. A failure is printed as a Configuration that --replay takes, and the exit code is 1; the run goes on
up to --failures of them.
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.checks import check
from support.configurations import Configuration, RandomChooser, draw


def parse_configuration(text: str) -> Configuration:
    """The Configuration whose repr is `text`: a call of literals, nothing else is evaluated."""
    tree = ast.parse(text.strip(), mode="eval").body
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "Configuration"):
        raise ValueError("expected Configuration(...) as a failure prints it")
    return Configuration(**{str(k.arg): ast.literal_eval(k.value) for k in tree.keywords})


def run(configuration: Configuration, device: str) -> dict[str, object] | None:
    """The path taken, or None after printing what went wrong."""
    try:
        return check(configuration, device)
    except Exception:
        print(f"\nFAILED on {device}: {configuration!r}\n{traceback.format_exc()}", flush=True)
        return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz.py", description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=20_000, help="configurations to check (20000)")
    parser.add_argument("--seed", type=int, default=0, help="which sequence of configurations (0)")
    parser.add_argument("--first", type=int, default=0, help="the number to start with (0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--dims", type=int, choices=(1, 2, 3), help="only these spatial dimensions")
    parser.add_argument("--transposed", choices=("yes", "no"), help="only transposed convolutions, or none")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch: the tensors are small (2)")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many failures (5)")
    parser.add_argument("--replay", metavar="CONFIGURATION", help="check this one configuration")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.device.startswith("cuda"):
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False

    if options.replay:
        found = run(parse_configuration(options.replay), options.device)
        print("failed" if found is None else f"passed: {found}")
        return int(found is None)

    transposed = None if options.transposed is None else options.transposed == "yes"
    last = options.first + options.n - 1
    print(f"seed {options.seed}, configurations {options.first} to {last}, {options.device}")
    started = shown = time.monotonic()
    paths: Counter[str] = Counter()
    failures = 0
    for number in range(options.first, last + 1):
        configuration = draw(RandomChooser(options.seed * 1_000_003 + number), options.dims, transposed)
        found = run(configuration, options.device)
        if found is None:
            failures += 1
            print(f"(seed {options.seed}, number {number})", flush=True)
            if failures >= options.failures:
                break
        else:
            paths[str(found.get("path", "empty")) if configuration.batch != 0 else "empty"] += 1
        now = time.monotonic()
        if now - shown >= 10 or number == last:
            done = number - options.first + 1
            taken = ", ".join(f"{count} {path}" for path, count in sorted(paths.items()))
            print(f"{done} of {options.n} in {now - started:.0f} s: {taken}, {failures} failed", flush=True)
            shown = now
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
