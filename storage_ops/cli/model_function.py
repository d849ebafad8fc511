"""`--model FILE.py:FUNCTION`: get a model and a batch without bytes from the user's function."""

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
_SIZES = "batch", "seq"  # options that the function can take, as keyword arguments


def takes(spelled: str, size: str) -> bool:
    """Return True if the function that --model names has an argument `size`: "batch" or "seq"."""
    return size in inspect.signature(_function(spelled)).parameters


def call(args: argparse.Namespace) -> tuple[nn.Module, Any, Callable[[Any], Tensor] | None]:
    """Call the function of --model on the meta device. Return its model, batch and loss function.

    The function gets --batch and --seq if it has arguments of these names. --dtype is torch's
    default dtype while the function runs.

    Raises:
        ValueError: the file, the function, its arguments or its result are wrong. The error names
            the file and the function.
    """
    import torch
    from torch import nn

    function = _function(args.model)
    sizes = _sizes(function, args)
    dtype = autocast.dtype_of_parameters(args, "fp32")
    try:
        with autocast.without_bytes(args), autocast.default_dtype(dtype):
            result = function(**sizes)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ValueError(
            f"--model is {args.model}, which raised {_with_line(error, args.model)}. Expected a "
            "function that runs on the meta device, without a GPU and weights, and returns (model, "
            "batch) or (model, batch, loss)."
        ) from error
    is_tuple = isinstance(result, tuple) and len(result) in (2, 3)
    if not (is_tuple and isinstance(result[0], nn.Module)):
        raise ValueError(f"--model is {args.model}, which returned {_types(result)}. {_EXPECTED}")
    model, batch, loss = (*result, None)[:3]
    if not isinstance(batch, (torch.Tensor, Mapping, tuple, list)):
        raise ValueError(
            f"--model is {args.model}, which returned a batch of type {_types(batch)}. Expected a "
            "tensor, a tuple, a dict, or a list of these."
        )
    if loss is not None and not callable(loss):
        raise ValueError(
            f"--model is {args.model}, which returned a loss of type {_types(loss)}. Expected a "
            "function of the model's output."
        )
    return model, batch, loss


def _function(spelled: str) -> Callable[..., Any]:
    """Return the function that `FILE.py:FUNCTION` names.

    Raises:
        ValueError: there is no such file or function, or importing the file fails.
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
        names = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        expected = f"Expected one of {', '.join(names)}" if names else "The file has no functions"
        raise ValueError(f"--model is {spelled}, but {path} has no function {name}. {expected}.")
    return function  # type: ignore[no-any-return]


def _imported(file: Path, spelled: str) -> Any:
    """Import a file once. It can import modules in its folder, as with `python file.py`."""
    name = f"storage_ops_model_{file.stem}"
    imported = sys.modules.get(name)
    if imported is not None and imported.__file__ == str(file.resolve()):
        return imported
    spec: Any = importlib.util.spec_from_file_location(name, file.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules[name] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[name]
        raise ValueError(
            f"--model is {spelled}, whose file raised {_in_line(error)}. Expected a file that "
            "Python can import."
        ) from error
    finally:
        sys.path.remove(str(file.resolve().parent))
    return module


def _sizes(function: Callable[..., Any], args: argparse.Namespace) -> dict[str, int]:
    """Return --batch and --seq as keyword arguments of the function.

    Raises:
        ValueError: the function does not take an option that is given, or it needs an argument
            that is not given.
    """
    parameters = inspect.signature(function).parameters
    for name in ("decoder_seq", "images", "audio", "labels"):
        if (value := getattr(args, name)) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} is {value}, but the function of --model returns its own batch. Leave out "
                f"{flag}."
            )
    values = {name: getattr(args, name) for name in _SIZES}
    sizes = {name: value for name, value in values.items() if value is not None}
    for name, value in sizes.items():
        if name not in parameters:
            raise ValueError(
                f"--{name} is {value}, but {args.model} has no argument {name}. Leave out --{name}."
            )
    for name, parameter in parameters.items():
        is_needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD,
        )  # fmt: skip
        if is_needed and name in _SIZES and name not in sizes:
            raise ValueError(f"--{name} is missing, but {args.model} needs it. Pass --{name}.")
        if is_needed and name not in _SIZES:
            raise ValueError(
                f"--model is {args.model}, which needs an argument {name}. Expected a function "
                "without arguments, or with batch and seq."
            )
    return sizes


def _types(value: object) -> str:
    """Return the type of a value, and the types of the items of a tuple."""
    name = type(value).__name__
    if isinstance(value, tuple):
        name += f" ({', '.join(type(item).__name__ for item in value)})"
    return name


def _with_line(error: BaseException, spelled: str) -> str:
    """Return an error in one line, with the innermost line of its traceback in FILE.py."""
    file, line = str(Path(spelled.rpartition(":")[0]).resolve()), ""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = f" at line {trace.tb_lineno}"
        trace = trace.tb_next
    return _in_line(error) + line


def _in_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
