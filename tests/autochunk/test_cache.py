"""A process that finds its graphs in Inductor's caches says what the first one said."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, warnings, torch, storage_ops
from torch._dynamo.utils import counters

def declined(x, w):
    return (x @ w.t()).sort(0)[0].square().mean()

def chunked(x, w):
    return torch.softmax(x @ w.t(), -1).square().sum()

x, w = torch.randn(64, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
warnings.simplefilter("ignore")
warnings.filterwarnings("always", message="storage_ops")
for f in (declined, chunked):
    if f.__name__ in sys.argv:
        torch.compile(f, backend="storage_ops", options={"num_chunks": 4})(x, w).backward()
assert not any("storage_ops" in key for key in counters["inductor"])
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


def words(folder, name, logs):
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    env["STORAGE_OPS_LOGS"] = "autochunk" if logs else ""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name], env=env, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if " = aten." in line]
    return int(done.stdout), lines


@pytest.mark.slow
@pytest.mark.parametrize("name", ["declined", "chunked"])
def test_a_warm_cache(name, tmp_path):
    found, first = words(tmp_path, name, logs=False)
    assert found == 0 and ["not chunked" in line for line in first] == [True] * (name == "declined")
    found, second = words(tmp_path, name, logs=False)
    assert found and second == first
    _, loud = words(tmp_path, name, logs=True)  # was not said before: compiled anew
    assert len(loud) > len(first) + 2
    found, again = words(tmp_path, name, logs=True)
    assert found and again == loud
