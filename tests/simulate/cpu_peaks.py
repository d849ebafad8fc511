"""Peaks of a function on a CPU: simulated and measured."""

from storage_ops.foundation.ledger import Ledger
from storage_ops.memory import measure
from storage_ops.simulate.captured import Captured
from storage_ops.simulate.estimate import call_simulated, simulating
from storage_ops.simulate.values.assume import Assumption


def simulated_peak(run):
    """Bytes above the inputs that a call of `run` takes at most, with the kernels of a CPU."""
    ledger, held = Ledger(int), Captured(run, (), {})
    with simulating(ledger, held, (), {}, Assumption(None), False) as (_, args, kwargs):
        call_simulated(run, args, kwargs)
    return max(ledger.levels()) - sum(block.nbytes for block in ledger.inputs)


def measured_peak(run):
    """Bytes that a second call of `run` allocates at most; the first one may fill caches."""
    run()
    with measure() as m:
        run()
    return m.peak_bytes
