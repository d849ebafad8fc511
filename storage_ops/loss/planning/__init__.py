"""From sizes and a memory budget to the tiles in which a head is computed. Needs no torch.

    plan.plan ---.
    engine.head --> Problem --> planner.choose --> Plan --> planner.schedule_of --> Schedule
                                   |-> cost.peak      bytes of the steps
                                   `-> cost.predict   their time, at the rates of `devices`

* `problem.Problem` holds all that a plan depends on: sizes, options, and the matrix products.
* `schedule.Schedule` is one way through the logits, as a series of `Step`. Its docstring says where
  logits lie meanwhile.
* `cost` adds up the bytes and the seconds of a schedule's steps.
* `planner` proposes schedules, and takes the fastest one that fits the budget.
* `devices` has the rates of processors, and asks what kind of device a tensor is on.
* `plan` is the public function `storage_ops.plan`.
"""
