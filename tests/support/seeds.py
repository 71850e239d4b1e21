"""Devices, and the seeds of random cases.

Tests take their data from one fixed seed. What draws random *cases* (which sizes, strides, modes are tried) starts from
a seed of the day, so that every day tries others; pytest's header prints it, and PATCHCONV_SEED repeats a day.
"""

from __future__ import annotations

import datetime
import os

import torch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DATA_SEED = 20240611
# The environment carries it to the workers of pytest-xdist, which must all collect the same cases.
SWEEP_SEED = int(os.environ.setdefault("PATCHCONV_SEED", datetime.date.today().strftime("%Y%m%d")))
