"""Fit a training step into a budget: choose what each layer recomputes.

    fit.fit -> Search -> Recorder -> StepRecording      memory and time besides the layers
                  |----> Probe -> Cost                  one layer with one action
                  |----> LossVariant -> ActionProblem   the fastest choice from these numbers
                  `----> simulate_step -> FitPlan       the peak of the whole step with this choice

There are too many plans to simulate the step with each. So the step is simulated once with
stand-ins for its layers, and each distinct layer is simulated once for each action. A dynamic
program over these numbers finds the fastest plan. Then the whole step is simulated with it.

Terms:

* A *layer* is a module that gets an action of its own, such as a decoder layer.
* An *action* is what a plan does to a layer: it recomputes, offloads, or runs in tiles. For the
  loss, it is a memory budget.
* The *cost* of an action is the kept bytes, the peaks and the seconds of one call of a layer.
* A *variant* is the step with one way to compute the loss.
* A *choice* is the number of an action for each call of a layer.
* A *moment* of a step is a number of events of its ledger. A *level* is the bytes in memory then.

Where things are:

* `fit.py` is the public function. `largest.py` repeats the search for batches of other sizes, or
  for other GPUs.
* `search.py` runs all parts and returns the plan (`plan.py`). A plan holds under some
  `conditions.py`, and knows layers by their `fingerprint.py`. `entries.py` checks saved plans.
* `units.py` finds the layers, and `heads.py` the losses with a budget.
  `storage_ops/simulate/module_kinds.py` decides which layers are equal.
* `actions.py` applies actions, and `choices.py` chooses those to try.
* `record.py` simulates the step without its layers, and `probe.py` one layer. `step.py` has the
  ledger of both, and `roofline.py` the time of ops.
* `loss_variants.py` combines the numbers, and `solve.py` has the dynamic program.
* `calibrate.py` measures the times of ops in the steps of small models (`samples.py`), and the
  host's time for actions. `calibration.py` keeps them in a file.
"""
