"""Downloads the C++ headers of torch minors: `python -m build_tools.torch_headers 2.10 2.11`.

They are unpacked from torch's wheels into build/torch-headers (or STORAGE_OPS_TORCH_HEADERS), where
setup.py reads them. Nothing is installed. A wheel of some hundred megabytes is deleted.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from build_tools.toolchain import headers_folder


def fetch(minor: str) -> Path:
    """Unpack the headers of the newest patch release of a minor, unless they exist."""
    target = headers_folder() / minor
    if (target / "include").exists():
        return target
    with tempfile.TemporaryDirectory() as folder:
        wanted = ["--only-binary", ":all:", "--dest", folder, f"torch=={minor}.*"]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *wanted]
        subprocess.run(pip, check=True)
        (wheel,) = Path(folder).glob("torch-*.whl")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as unpacked:
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.startswith("torch/include/")]
                archive.extractall(unpacked, names)
            (Path(unpacked) / "torch").rename(target)  # complete or not at all
    return target


if __name__ == "__main__":
    for minor in sys.argv[1:]:
        print(fetch(minor))
