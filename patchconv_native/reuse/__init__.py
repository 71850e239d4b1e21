"""Without gradients, a layer or a function may write its result into its input, if nobody can read the input again.

spent       whether that is so: who holds the tensor, counted
callers     what the code that called does with the tensor afterwards, read from its bytecode
in_place    the layers that can, each with the numbers of its stock forward
functions   the functions that can, within the code of a module
"""

from __future__ import annotations

from .functions import InPlaceFunctions, enter_again, leave, worth_a_look
from .in_place import in_place
from .spent import Probe, is_large, is_spent

__all__ = ["InPlaceFunctions", "Probe", "enter_again", "in_place", "is_large", "is_spent", "leave", "worth_a_look"]
