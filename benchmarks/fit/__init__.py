"""Plans of `fit` and their simulated peaks: `python -m benchmarks.fit [CASE] --json OUT`.

Every case trains models with AdamW. A peak is everything on the device during a step from the
second on, measured by allocation events. `models.py` has the models and the measured peak.
"""

# Case -> the name of its results, and its measurements.
CASES = {
    "peaks": (
        "fit",
        "simulated against measured peaks of models of six families, without and with full "
        "checkpoints, and the CPU seconds of `will_it_fit` for Llama-8B",
    ),
    "budgets": (
        "fit_budgets",
        "twenty budgets from the smallest feasible one, the holders that `explain_oom` names under "
        "a limit, and an MLP in tiles",
    ),
    "plans": (
        "fit_plans",
        "time against peak of plans, of torch's full and selective checkpoints, and of "
        "torch.compile with an activation memory budget",
    ),
    "compiled": (
        "fit_compiled",
        "plans of compiled models at the peaks of torch.compile with activation memory budgets, "
        "each case in a process of its own",
    ),
    "carried": (
        "carried_plans",
        "plans for a Llama of 1.5 billion parameters, made on the meta device for an H100 and "
        "carried out here",
    ),
    "predictions": (
        "fit_predictions",
        "predicted against measured times of full checkpoints and of plans, by the table of "
        "devices and by a calibration",
    ),
    "timeline": (
        "fit_timeline",
        "simulated memory over a step of that Llama, without a plan and with one for half the peak",
    ),
}
