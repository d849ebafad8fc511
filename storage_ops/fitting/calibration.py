"""Times that `calibrate` measured, and the file in which they are kept for `fit`."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from storage_ops import _library
from storage_ops.loss.planning.devices import Rates, of_gpu, rates_of
from storage_ops.loss.planning.op_times import HostTimes, MeasuredTimes
from storage_ops.quantities import Tabular, metric

if TYPE_CHECKING:
    from storage_ops.tables import Grid

_FORMAT = 1
_CPU_FACTS = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Calibration(Tabular):
    """Times of ops that were measured on a device. Prints as a table.

    Attributes:
        device: the name of the processor with its number of threads, or of the GPU.
        op_times: measured times of ops.
        host: measured times of the host. All are 0 for a GPU.
        path: the file that keeps them.
    """

    device: str
    op_times: MeasuredTimes
    host: HostTimes
    path: Path

    def save(self) -> None:
        """Write the file. A reader never sees a part of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        points = {
            op: {dtype: [[float(f"{n:.4g}") for n in point] for point in points]
                 for dtype, points in by_dtype.items()}
            for op, by_dtype in sorted(self.op_times.points.items())
        }  # fmt: skip
        facts = {**_versions(self.device), "host": asdict(self.host), "op_times": points}
        number, name = tempfile.mkstemp(dir=self.path.parent, suffix=".part")
        try:
            with os.fdopen(number, "w") as file:
                json.dump(facts, file)
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def used_in(self, rates: Rates) -> Rates:
        """Return rates with the measured times. Compiled code has no host times."""
        host = rates.host if rates.fuses or rates.overlaps else self.host
        return replace(rates, op_times=self.op_times, host=host)

    def __rich__(self) -> Grid:
        from storage_ops.tables import Grid

        rows = [
            (op, dtype, f"{work:.3g}", metric(seconds, "s"))
            for op, by_dtype in sorted(self.op_times.points.items())
            for dtype, points in sorted(by_dtype.items())
            for work, seconds in points[-1:]
        ]
        title = f"Calibration of {self.device}"
        columns = ("op", "dtype", "operations or bytes", "time")
        return Grid(title, columns, rows, f"largest calls of each op; kept in {self.path}",
                    words=("op",))  # fmt: skip


def _versions(device: str) -> dict[str, Any]:
    """Return the facts that must be equal for a file to be valid."""
    return {
        "format": _FORMAT, "device": device, "torch": torch.__version__,
        "storage_ops": _library.version(),
    }  # fmt: skip


def device_name(device: torch.device) -> str:
    """Return the name under which a device is calibrated. Threads are a part of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = re.findall(r"model name\s*:\s*(.+)", _CPU_FACTS.read_text())
    name = names[0].strip() if names else platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def folder() -> Path:
    """Return the folder of calibrations in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "storage_ops" / "calibrations"


def path_of(device: str) -> Path:
    """Return the file of a device, for the installed versions."""
    facts = (device, f"torch {torch.__version__}", f"storage_ops {_library.version()}")
    return folder() / f"{re.sub(r'[^A-Za-z0-9.+]+', '-', ' '.join(facts))}.json"


def load(path: Path) -> Calibration | None:
    """Read a calibration. None: there is no file, or it is broken or of other versions."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        device = facts["device"]
        versions = _versions(device)
        if path.name != path_of(device).name or any(facts[k] != versions[k] for k in versions):
            return None
        points = {
            str(op): {
                str(dtype): tuple((_positive(work), _positive(seconds)) for work, seconds in pairs)
                for dtype, pairs in by_dtype.items()
            }
            for op, by_dtype in facts["op_times"].items()
        }
        host = HostTimes(**{key: float(value) for key, value in facts["host"].items()})
    except (OSError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None
    return Calibration(device, MeasuredTimes(points), host, path)


def _positive(number: object) -> float:
    value = float(number)  # type: ignore[arg-type]
    if not 0 < value < float("inf"):
        raise ValueError(f"A point has {number!r}. Expected a positive number.")
    return value


def calibration_of(rates: Rates) -> Calibration | None:
    """Return the calibration of the device with these rates, or None.

    For a GPU that is named, the calibration may be of another machine, if its file is here.
    """
    if not rates.overlaps:
        return load(path_of(device_name(torch.device("cpu"))))
    if torch.cuda.is_available():
        own = torch.device("cuda", torch.cuda.current_device())
        if rates_of(own).name == rates.name:
            return load(path_of(device_name(own)))
    for path in sorted(folder().glob("*.json")):
        calibration = load(path)
        of_table = None if calibration is None else of_gpu(calibration.device)
        if of_table is not None and of_table.name == rates.name:
            return calibration
    return None
