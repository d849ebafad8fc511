"""Chooses the tiles of a head, from sizes and a memory budget. Needs no torch.

    plan.plan ---.
    engine.head --> Problem --> planner.choose --> Plan --> planner.schedule_of --> Schedule
                                   |-> cost.peak      bytes of the steps
                                   `-> cost.predict   their time, at the rates of `devices`

* `problem.Problem` has all that a plan depends on: sizes, options, and the matrix products.
* `schedule.Schedule` is an order of the tiles of logits, as a series of `Step`. The module's
  docstring says where logits are stored.
* `cost` adds up the bytes and the seconds of a schedule's steps.
* `planner` proposes schedules, and takes the fastest one that fits the budget.
* `budgets` has the bounds of default budgets.
* `devices` has the rates of processors, and finds the kind of device of a tensor. `op_times` has
  measured times of ops.
* `plan` is the public function `storage_ops.plan`.
"""
