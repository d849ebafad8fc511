"""Optional packages: an error names a missing package and the feature that needs it."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = {"yaml": "pyyaml"}  # packages whose name on PyPI differs from the module's
_OLDEST = {"transformers": (4, 57)}  # the oldest version that is tested


def required(package: str, user: str) -> Any:
    """Import an optional package, and return it.

    Args:
        package: the package's name, such as "matplotlib", or the name of a module in it.
        user: the feature that needs it, such as "from_yaml". The error begins with it.

    Raises:
        ModuleNotFoundError: it is not installed. The error names the feature, the package and the
            command that installs it.
        ImportError: it is installed but cannot be imported, or is too old. The error says why.

    Example:
        >>> required("math", "this example").sqrt(4)
        2.0
        >>> required("no_such_package", "this example")
        Traceback (most recent call last):
            ...
        ModuleNotFoundError: this example needs no_such_package, which is not installed. Run: ...
    """
    name = package.partition(".")[0]
    try:
        importlib.import_module(name)
        module = importlib.import_module(package)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            pip = f"pip install {_DISTRIBUTIONS.get(name, name)}"
            raise ModuleNotFoundError(
                f"{user} needs {name}, which is not installed. Run: {pip}", name=name
            ) from None
        raise ImportError(
            f"{user} needs {name}, which is installed, but its import fails: {error}", name=name
        ) from error
    check_version(name, user)
    return module


def check_version(name: str, user: str) -> None:
    """Raise an ImportError if an imported package is older than the oldest supported version."""
    version = str(getattr(sys.modules.get(name), "__version__", ""))
    parts = re.match(r"(\d+)\.(\d+)", version)
    oldest = _OLDEST.get(name)
    if parts and oldest and (int(parts[1]), int(parts[2])) < oldest:
        least = ".".join(map(str, oldest))
        raise ImportError(
            f"{user} needs {name} {least} or newer, and {version} is installed. "
            f"Run: pip install '{name}>={least}'",
            name=name,
        )


def check_drawable(path: str | os.PathLike[str], images_only: bool = False) -> None:
    """Raise an error early if a file cannot be drawn.

    plotly draws a page (".html"). A snapshot (".pickle") needs no package. matplotlib draws images,
    and with `images_only` all other files.

    Raises:
        ModuleNotFoundError: the package that draws the file is missing.
        ValueError: matplotlib has no format for the path's ending.
    """
    others = {} if images_only else {".html": "plotly", ".pickle": None}
    ending = Path(path).suffix.lower()
    package = others.get(ending, "matplotlib")
    if package is not None:
        required(package, f"drawing {path}")
    if package == "matplotlib" and ending:
        from matplotlib.backend_bases import FigureCanvasBase

        known = [*others, *(f".{name}" for name in FigureCanvasBase.get_supported_filetypes())]
        if ending not in known:
            raise ValueError(
                f"The picture {path} has an unknown format. Expected one of {', '.join(known)}."
            )
