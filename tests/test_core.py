"""The core works without the parts that use it."""

import subprocess
import sys
from pathlib import Path

import pytest

# A package without its `__init__`, which would import everything.
PROGRAM = """
import sys, types
package = types.ModuleType("storage_ops")
package.__path__ = [{path!r}]
sys.modules["storage_ops"] = package
from storage_ops import _library
from storage_ops.storage import kernels
kernels.register(_library.load())
from storage_ops.checkpoint.discard import output_discard
from storage_ops.checkpoint.layers import tile, transform
from storage_ops.losses import preference
from storage_ops.divergence import api
above = ("graph", "autochunk", "measure", "simulate", "fitting", "oom", "memory", "integrations")
print([m for m in sys.modules if m.startswith(tuple("storage_ops." + name for name in above))])
"""


@pytest.mark.in_turn
def test_the_core_imports_nothing_above_it():
    path = str(Path(__file__).parent.parent / "storage_ops")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(path=path)], capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
