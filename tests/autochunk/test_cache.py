"""A process that loads graphs from Inductor's caches repeats the messages of the first process."""

import os
import subprocess
import sys

import pytest

# One process runs without and with logging, because imports take most of the time.
SCRIPT = """
import logging, sys, warnings, torch, storage_ops
from torch._dynamo.utils import counters

def declined(x, w):
    return (x @ w.t()).sort(0)[0].square().mean()

def chunked(x, w):
    return torch.softmax(x @ w.t(), -1).square().sum()

log, f = logging.getLogger("storage_ops.autochunk"), globals()[sys.argv[1]]
assert log.level == logging.DEBUG
x, w = torch.randn(64, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
warnings.simplefilter("ignore")
warnings.filterwarnings("always", message="storage_ops")
for level in (logging.WARNING, logging.DEBUG):
    log.setLevel(level)
    torch._dynamo.reset()
    counters.clear()
    torch.compile(f, backend="storage_ops", options={"num_chunks": 4})(x, w).backward()
    assert not any("storage_ops" in key for key in counters["inductor"])
    print(counters["aot_autograd"]["autograd_cache_hit"])
    print("end", file=sys.stderr)
"""


def messages(folder, name):
    """Return the number of cached graphs, and the messages without and with logging."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "STORAGE_OPS_LOGS": "autochunk"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name], env=env, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    quiet, loud, _ = (
        [line for line in said.splitlines() if " = aten." in line]
        for said in done.stderr.split("end\n")
    )
    return [int(count) for count in done.stdout.split()], quiet, loud


@pytest.mark.slow
def test_a_warm_cache(tmp_path):
    for name in ("declined", "chunked"):
        (first, second), quiet, loud = messages(tmp_path / name, name)
        assert (
            first == 0 and second <= 1
        )  # a graph without logged messages is compiled again, with its chunk from the cache
        assert ["not chunked" in line for line in quiet] == [True] * (name == "declined")
        assert len(loud) > len(quiet) + 2
        cached, *again = messages(tmp_path / name, name)
        assert cached[0] > first and cached[1] > second and again == [quiet, loud]
