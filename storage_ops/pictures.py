"""Which package draws a picture, and whether it is there: asked before the work, not after."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def check_drawable(path: str | os.PathLike[str], images_only: bool = False) -> None:
    """Raise a ModuleNotFoundError if what draws a file is not installed; its ending says what does.

    A page (".html") is made by plotly, a snapshot (".pickle") by nothing, an image by matplotlib,
    and with `images_only` every file.
    """
    others = {} if images_only else {".html": "plotly", ".pickle": None}
    package = others.get(Path(path).suffix.lower(), "matplotlib")
    if package is not None and importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{path} is drawn by {package}, which is not installed. Run: "
            "pip install 'storage_ops[plot]'",
            name=package,
        )
