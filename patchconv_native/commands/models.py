"""MODEL of the command line: a name in torchvision or timm, or a callable in the user's module or file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..memory.fake import unlogged
from .errors import Failed, Mistake, line, near, out_of_memory
from .progress import note

HELP = "torchvision:NAME, timm:NAME, module:callable or path/to/file.py:callable (a callable returns a torch.nn.Module)"
EXPECTED = "torchvision:NAME, timm:NAME, module:callable or file.py:callable"
LIBRARIES = ("torchvision", "timm")

Answer = TypeVar("Answer")


@dataclass
class Source:
    """Where a model comes from."""

    name: str
    make: Callable[[], Any]

    def build(self) -> nn.Module:
        """The model. From a library it has random weights: nothing is downloaded."""
        try:
            model = self.make()
        except (Mistake, Failed):
            raise
        except Exception as error:
            raise Failed(f"{self.name} did not make a model: {line(error)}") from error
        if not isinstance(model, nn.Module):
            raise Mistake(f"expected {self.name} to return a torch.nn.Module, got {type(model).__name__}")
        return model

    @unlogged()
    def without_memory(self, work: Callable[[nn.Module], Answer]) -> Answer:
        """Returns work(model) for the model on the meta device, or for a real one if that is not possible."""
        try:
            with torch.device("meta"):
                model = self.build()
        except Failed as error:
            reason = f"cannot be built on the meta device ({line(error.__cause__ or error)})"
        else:
            try:
                return work(model)
            except Mistake:
                raise
            except Exception as error:
                # A tensor that is neither parameter nor buffer stays on the meta device, unlike the others.
                if "meta" not in f"{error} {error.__cause__}" or out_of_memory(error):
                    raise
                reason = f"does not run as built on the meta device ({line(error.__cause__ or error)})"
        model = self.build()
        note(f"the model {reason}: its parameters take memory")
        return work(model)


def find(text: str) -> Source:
    """The source of a model by its name. Nothing is built yet. Raises Mistake if there is none."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise Mistake(f"expected MODEL to be {EXPECTED}, got {text!r}{_libraries_with(text)}")
    if where == "torchvision":
        return Source(text, _torchvision(name))
    if where == "timm":
        return Source(text, _timm(name))
    return Source(text, _callable(text, where, name))


def _library(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise Mistake(f"expected MODEL to come from a library that is installed, got {name}: pip install {name}")
    try:  # torchvision is compiled for one build of torch, and beside another one it fails in ways of its own
        return importlib.import_module(name)
    except Exception as error:
        raise Mistake(f"the {name} installed here does not work with this torch ({line(error)})") from error


def _names(library: str) -> list[str]:
    found = _library(library)
    return list(found.models.list_models() if library == "torchvision" else found.list_models())


def _libraries_with(name: str) -> str:
    """A hint for a name without its library."""
    found = []
    for library in LIBRARIES:
        try:
            if name in _names(library):
                found.append(f"{library}:{name}")
        except Mistake:
            continue
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _torchvision(name: str) -> Callable[[], Any]:
    names = _names("torchvision")
    if name not in names:
        raise Mistake(f"expected a model of torchvision, got {name!r}{near(name, names, 'torchvision:')}")
    from torchvision import models

    # Detectors would otherwise download weights of their backbones.
    absent = {"weights", "weights_backbone"} & set(inspect.signature(models.get_model_builder(name)).parameters)
    return lambda: models.get_model(name, **dict.fromkeys(absent))


def _timm(name: str) -> Callable[[], Any]:
    timm = _library("timm")
    if not timm.is_model(name):
        raise Mistake(f"expected a model of timm, got {name!r}{near(name, _names('timm'), 'timm:')}")
    return lambda: timm.create_model(name, pretrained=False)


def _callable(text: str, where: str, name: str) -> Callable[[], Any]:
    module = _file(where) if where.endswith(".py") else _module(where)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            known = [one for one in dir(found) if not one.startswith("_") and callable(getattr(found, one, None))]
            raise Mistake(f"expected {where} to have a {name!r}, got none{near(part, known)}") from None
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise Mistake(f"expected {text} to be a callable that returns a torch.nn.Module, got {type(found).__name__}")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise Mistake(f"expected {text} to be a callable without arguments, got one that says: {error}") from None
    except ValueError:
        pass  # some built-in callables do not tell their arguments
    return found


def _module(where: str) -> Any:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            known = [*LIBRARIES, *(file.stem for file in Path().glob("*.py"))]
            raise Mistake(
                f"expected a module that can be imported from here, got {where!r}{near(where, known)}"
            ) from None
        raise Failed(f"importing {where} failed: {line(error)}") from error
    except (ValueError, TypeError) as error:  # "..", ".x" and the like
        raise Mistake(f"expected a module's name, got {where!r} ({error})") from None
    except Exception as error:
        raise Failed(f"importing {where} failed: {line(error)}") from error


def _file(where: str) -> Any:
    path = Path(where)
    if not path.is_file():
        files = [str(file) for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise Mistake(f"expected a Python file, got {where!r}, which is not there{near(str(path), files)}")
    name = f"patchconv_native_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None  # a file that ends in .py has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes are looked up there
    sys.path.insert(0, str(path.resolve().parent))  # its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Failed(f"running {where} failed: {line(error)}") from error
    return module
