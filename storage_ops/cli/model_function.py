"""`--model FILE.py:FUNCTION`: the caller's own model and batch, without bytes."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage_ops.cli import autocast

if TYPE_CHECKING:
    from torch import Tensor, nn

_EXPECTED = "Expected (model, batch) or (model, batch, loss)."
_SIZES = "batch", "seq"  # options that the function takes as keyword arguments of these names


def takes(spelled: str, size: str) -> bool:
    """Return True if the function of --model has an argument of this name, "batch" or "seq"."""
    return size in inspect.signature(_function(spelled)).parameters


def call(args: argparse.Namespace) -> tuple[nn.Module, Any, Callable[[Any], Tensor] | None]:
    """Call the function of --model on the meta device; return its model, batch and loss.

    The function gets --batch and --seq if it has arguments of these names. --dtype is torch's
    default dtype while the function runs.

    Raises:
        ValueError: the file, the function, its arguments or what it returns are wrong; the error
            names the file and the function.
    """
    import torch
    from torch import nn

    function = _function(args.model)
    given = _sizes(function, args)
    dtype = autocast.dtype_of_parameters(args, "fp32")
    try:
        with autocast.without_bytes(args), autocast.default_dtype(dtype):
            made = function(**given)
    except Exception as error:  # the caller's own code may raise anything
        raise ValueError(
            f"--model is {args.model}, which raised {_place(error, function)}. {_EXPECTED}"
        ) from error
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
        raise ValueError(f"--model is {args.model}, which returned {_kind(made)}. {_EXPECTED}")
    model, batch, loss = (*made, None)[:3]
    if not isinstance(batch, (torch.Tensor, Mapping, tuple, list)):
        raise ValueError(
            f"--model is {args.model}, which returned a batch that is a {_kind(batch)}. Expected a "
            "tensor, a tuple, a dict, or a list of such."
        )
    if loss is not None and not callable(loss):
        raise ValueError(
            f"--model is {args.model}, which returned a loss that is a {_kind(loss)}. Expected a "
            "function of the model's output."
        )
    return model, batch, loss


def _function(spelled: str) -> Callable[..., Any]:
    """Return the function that `FILE.py:FUNCTION` names.

    Raises:
        ValueError: there is no such file or function, or the file does not run.
    """
    path, _, name = spelled.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"--model is {spelled}. Expected a file and a function: FILE.py:FUNCTION.")
    file = Path(path)
    if not file.is_file():
        raise ValueError(
            f"--model is {spelled}, but there is no file {path}. Expected FILE.py:FUNCTION."
        )
    module = _imported(file, spelled)
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        have = f"its functions are {', '.join(own)}" if own else "it has no functions"
        raise ValueError(f"--model is {spelled}, but {path} has no function {name}: {have}.")
    return function  # type: ignore[no-any-return]


def _imported(file: Path, spelled: str) -> Any:
    """Import a file once, as `python file.py` would find the modules beside it."""
    name = f"storage_ops_model_{file.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(file.resolve()):
        return known
    spec: Any = importlib.util.spec_from_file_location(name, file.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules[name] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the caller's own code may raise anything
        del sys.modules[name]
        raise ValueError(
            f"--model is {spelled}, whose file raised {_in_line(error)}. Expected a file that "
            "Python can import."
        ) from error
    finally:
        sys.path.remove(str(file.resolve().parent))
    return module


def _sizes(function: Callable[..., Any], args: argparse.Namespace) -> dict[str, int]:
    """Return --batch and --seq by the names of arguments that the function has.

    Raises:
        ValueError: an option is given that the function does not take, or an argument of the
            function has no default and no option.
    """
    parameters = inspect.signature(function).parameters
    for name in ("decoder_seq", "images", "audio", "labels"):
        if (value := getattr(args, name)) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} is {value}, but the batch of --model has everything. Leave out {flag}."
            )
    values = {name: getattr(args, name) for name in _SIZES}
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if name not in parameters:
            raise ValueError(
                f"--{name} is {value}, but {args.model} has no argument {name}. Leave out --{name}."
            )
    for name, parameter in parameters.items():
        is_needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD,
        )  # fmt: skip
        if is_needed and name in _SIZES and name not in given:
            raise ValueError(f"--{name} is missing, and {args.model} needs it. Pass --{name}.")
        if is_needed and name not in _SIZES:
            raise ValueError(
                f"--model is {args.model}, which needs an argument {name}. Expected a function "
                "without arguments, or with batch and seq."
            )
    return given


def _kind(value: object) -> str:
    """Return what a value is: its type, and those of the items of a tuple."""
    name = type(value).__name__
    if isinstance(value, tuple):
        name += f" ({', '.join(type(item).__name__ for item in value)})"
    return name


def _place(error: Exception, function: Callable[..., Any]) -> str:
    """Return an error in one line, with the last line of the function's file on its way."""
    file, line = inspect.getsourcefile(function), ""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = f" at line {trace.tb_lineno}"
        trace = trace.tb_next
    return _in_line(error) + line


def _in_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
