"""What a Python function that is calling `callee(x, ...)` at this moment does: which callee, which x, is x read again.

Read from the function's bytecode, as CPython 3.10 to 3.13 write it. What is not understood gets no answer (None).
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

_LOOKS_AT_LOCALS = frozenset({
    "locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe", "breakpoint",
    "set_trace", "embed", "interact", "evaluate", "query",
})  # fmt: skip
"""A function that mentions one of these may read a variable by its name."""
_DOES_NOTHING = frozenset({"PRECALL", "CACHE", "NOP", "RESUME", "EXTENDED_ARG", "KW_NAMES"})
# What calls take from the stack besides arguments: the callee (and what CPython puts beside it), and keywords' names.
_CALLS = {"CALL": (2, 0), "CALL_KW": (2, 1), "CALL_METHOD": (2, 0), "CALL_FUNCTION": (1, 0), "CALL_FUNCTION_KW": (1, 1)}
_MAKES_A_VALUE = frozenset({"LOAD_CONST", "LOAD_DEREF"})
"""These put one value on the stack. (BINARY_... take some and put one there.)"""
_OPCODES = {"BINARY_ADD": "+", "BINARY_SUBTRACT": "-", "BINARY_MULTIPLY": "*", "BINARY_TRUE_DIVIDE": "/"}
"""In Python 3.10. Later they are arguments of BINARY_OP."""
_LEAVES = frozenset({
    "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD",
    "JUMP_BACKWARD_NO_INTERRUPT",
})  # fmt: skip
"""The instruction after these is not the next one."""
_BEGINS_A_TRY = frozenset({"SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH"})


@dataclass(frozen=True)
class _Name:
    """A variable of the function, or a global one, and the attributes that are taken of it."""

    of_the_function: bool
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Call:
    callee: _Name


@dataclass(frozen=True)
class _Arithmetic:
    """`a + b`, say, and which of a and b are variables of the function."""

    sign: str
    operands: frozenset[str]


def holds_in_call(frame: types.FrameType, callee: Any, argument: Any) -> int | None:
    """How many variables of `frame`, which is calling callee(argument, ...), hold the argument.

    None if one of them is read again, or if the function calls something else.
    """
    seen = _seen_in(frame)
    if not isinstance(seen, _Call):
        return None
    variables = _variables(frame)
    found = _value(frame, seen.callee, variables)
    is_it = found is callee or (isinstance(found, types.BuiltinFunctionType) and found == callee)
    return _held(frame, variables, argument) if is_it else None


def holds_in_arithmetic(frame: types.FrameType, sign: str, operand: Any) -> int | None:
    """The same for `frame` that is computing `a + b`, say, of which one is the operand and a variable."""
    seen = _seen_in(frame)
    if not isinstance(seen, _Arithmetic) or seen.sign != sign:
        return None
    variables = _variables(frame)
    if not any(variables.get(name) is operand for name in seen.operands):
        return None
    return _held(frame, variables, operand)


def computes(code: types.CodeType, signs: frozenset[str]) -> bool:
    """Whether the function has `a + b`, say, in its own code."""
    return any(_sign(step) in signs for step in dis.get_instructions(code))


def _sign(step: dis.Instruction) -> str | None:
    return step.argrepr if step.opname == "BINARY_OP" else _OPCODES.get(step.opname)


def _held(frame: types.FrameType, variables: dict[str, Any], value: Any) -> int | None:
    names = [name for name, one in variables.items() if one is value]
    return None if any(_is_read_again(frame.f_code, frame.f_lasti, name) for name in names) else len(names)


def _variables(frame: types.FrameType) -> dict[str, Any]:
    """The variables of a running function. None of a function in which somebody else looks at them."""
    every = frame.f_locals
    if sys.version_info >= (3, 13):
        return dict(every)
    if sys.getrefcount(every) > _OWN_LOOK:
        return {}
    found = dict(every)
    every.clear()  # it would live as long as the frame, with all that it holds
    return found


_OWN_LOOK = 3  # the frame, `every` above, and the count's argument


def _value(frame: types.FrameType, name: _Name, variables: dict[str, Any]) -> Any:
    """Of modules of either kind, without running anything. None for others."""
    first, *rest = name.names
    value = variables.get(first) if name.of_the_function else frame.f_globals.get(first)
    for attribute in rest:
        if isinstance(value, nn.Module):
            value = vars(value).get("_modules", {}).get(attribute)
        elif isinstance(value, types.ModuleType):
            value = vars(value).get(attribute)
        else:
            return None
    return value


def _seen_in(frame: types.FrameType) -> _Call | _Arithmetic | None:
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED or not _LOOKS_AT_LOCALS.isdisjoint(code.co_names):
        return None
    return _seen_at(code, frame.f_lasti)


def _at(code: types.CodeType, place: int) -> tuple[list[dis.Instruction], int]:
    """The function's instructions, and which of them runs. Caches may follow a call."""
    steps = list(dis.get_instructions(code))
    return steps, max((i for i, step in enumerate(steps) if step.offset <= place), default=0)


@functools.lru_cache(maxsize=4096)
def _seen_at(code: types.CodeType, place: int) -> _Call | _Arithmetic | None:
    steps, at = _at(code, place)
    step = steps[at]
    sign = _sign(step)
    if sign is not None:
        operands = [one for one in _stack_before(steps, at, 2) if isinstance(one, _Name)]
        return _Arithmetic(
            sign, frozenset(one.names[0] for one in operands if one.of_the_function and len(one.names) == 1)
        )
    if step.opname not in _CALLS or not step.arg:
        return None
    of_callee, of_keywords = _CALLS[step.opname]
    taken = _stack_before(steps, at, of_callee + step.arg + of_keywords)
    named = [one for one in taken[:of_callee] if one is not _NULL]
    return _Call(named[0]) if len(named) == 1 and isinstance(named[0], _Name) else None


@functools.lru_cache(maxsize=4096)
def _is_read_again(code: types.CodeType, place: int, name: str) -> bool:
    """Whether the function, or one inside of it, may read its variable after what it does at this place."""
    if name in code.co_cellvars or name in code.co_freevars:
        return True
    return _reads_again(code, *_at(code, place), name)


_COMPUTED, _NULL = object(), object()
"""On the stack besides names: what the function computed, and what CPython puts beside a callee. None: not known."""


def _stack_before(steps: list[dis.Instruction], at: int, count: int) -> list[Any]:
    """The uppermost values on the stack before the instruction steps[at]."""
    begin = at
    while begin > 0 and not steps[begin].is_jump_target and steps[begin - 1].opname not in _LEAVES:
        begin -= 1
    stack: list[Any] = []
    for step in steps[begin:at]:
        _follow(stack, step)
    return _pop(stack, count)


def _pop(stack: list[Any], count: int) -> list[Any]:
    taken = [stack.pop() if stack else None for _ in range(count)]
    return taken[::-1]


def _follow(stack: list[Any], step: dis.Instruction) -> None:
    """What an instruction does to the stack. After one that is not served here nothing is known of the stack."""
    name, count = step.opname, step.arg or 0
    if name in _DOES_NOTHING:
        return
    if name in ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST"):
        loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        stack.extend(_Name(True, (one,)) for one in loaded)
    elif name == "LOAD_GLOBAL":
        _push_callee(stack, _Name(False, (step.argval,)), sys.version_info >= (3, 11) and count & 1)
    elif name in ("LOAD_ATTR", "LOAD_METHOD"):
        (base,) = _pop(stack, 1)
        value = _Name(base.of_the_function, (*base.names, step.argval)) if isinstance(base, _Name) else _COMPUTED
        _push_callee(stack, value, name == "LOAD_METHOD" or (sys.version_info >= (3, 12) and count & 1))
    elif name == "PUSH_NULL":
        stack.append(_NULL)
    elif name == "STORE_FAST":
        _pop(stack, 1)
    elif name in _CALLS:
        _pop(stack, count + sum(_CALLS[name]))
        stack.append(_COMPUTED)
    elif name in _MAKES_A_VALUE or name.startswith("BINARY_"):
        _pop(stack, 1 - dis.stack_effect(step.opcode, step.arg))
        stack.append(_COMPUTED)
    else:
        stack.clear()


def _push_callee(stack: list[Any], value: Any, with_null: Any) -> None:
    stack.extend((_NULL, value) if with_null else (value,))


def _reads_again(code: types.CodeType, steps: list[dis.Instruction], at: int, name: str) -> bool:
    """Whether some way through the function, after the call steps[at], reads the variable before it sets it."""
    places = {step.offset: i for i, step in enumerate(steps)}
    ways = [at + 1, *(places[target] for target in _handlers(code, steps))]
    known: set[int] = set()
    while ways:
        i = ways.pop()
        if i in known or i >= len(steps):
            continue
        known.add(i)
        step = steps[i]
        first = _first_use(step, name)
        if first == "reads":
            return True
        if first == "sets":
            continue
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            ways.append(places[step.argval])
        if step.opname not in _LEAVES:
            ways.append(i + 1)
    return False


def _first_use(step: dis.Instruction, name: str) -> str | None:
    """What an instruction does first with the variable."""
    if step.opname == "STORE_FAST":
        return "sets" if step.argval == name else None
    if step.opname == "STORE_FAST_LOAD_FAST":
        return "sets" if step.argval[0] == name else "reads" if step.argval[1] == name else None
    if step.opname == "STORE_FAST_STORE_FAST":
        return "sets" if name in step.argval else None
    named = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return "reads" if step.opcode in dis.haslocal and name in named else None


def _handlers(code: types.CodeType, steps: list[dis.Instruction]) -> Iterator[int]:
    """Where the function may go on after an exception."""
    for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
        yield entry.target
    for step in steps:
        if step.opname in _BEGINS_A_TRY:
            yield step.argval
