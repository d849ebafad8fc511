# pyright: strict
"""A user's file with every public name: mypy (`make lint`) and pyright (`make types`) check it.

Both are strict. `test_house.py` compares it with `__all__`. It is checked, not run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot
import torch
from torch import Tensor, fx, nn

import storage_ops as so
from storage_ops import integrations


def storage(x: Tensor) -> bool:
    so.discard_storage(x, streams=[])
    so.share_storage(x, torch.empty_like(x))
    with so.check_discarded():
        return so.is_discarded(x)


def discarding(producer: nn.Module, consumer: nn.Module, x: Tensor) -> Tensor:
    region = so.OutputDiscardCheckpoint(determinism_check="checksum")
    y = region.checkpoint(producer, x)
    with region.consumer():
        y = consumer(y)
    region.discard_output_and_register_recompute()
    chain = so.OutputDiscardChain()
    module: nn.Module = so.OutputDiscard(producer, consumer)
    called: Tensor = so.output_discard(producer, consumer)(x)
    handle = so.register_rng_tracker(torch.default_generator)
    handle.remove()
    try:
        result: Tensor = y + called + module(x)
        return result
    except so.DiscardedTensorError as error:
        raise RuntimeError(chain) from error


def checkpointing(model: nn.Module, x: Tensor) -> nn.Module:
    cfg = so.ActivationCheckpointConfig(layer_names=["layers.*"], policy="matmuls")
    model = so.apply_activation_checkpoint(model, cfg)
    print(so.checkpoint_report(model, x).kept_bytes)
    with so.disable_checkpointing():
        model(x)
    print(so.explain_policy(model, x, policy="attention"))
    wrapped: nn.Module = so.CheckpointWrapper(nn.Linear(2, 2))
    tiled: nn.Module = so.tile(wrapped, tiles=4)
    return so.remove_activation_checkpoint(nn.Sequential(model, tiled))


def policies(ctx: Any, op: Any) -> list[so.policies.Policy]:
    kept = so.policies.union(so.policies.matmuls, so.policies.save("aten.mm"))
    so.policies.contexts(so.policies.everything)
    with so.policies.simulated_copies(bytes_per_second=50e9) as copies:
        simulated: so.policies.SimulatedCopies = copies
        print(simulated.waited_seconds)
    return [
        so.policies.difference(kept, so.policies.attention),
        so.policies.every_kth(so.policies.communication, 2),
        so.policies.every_other_mm,
        so.policies.offload(kept),
        so.policies.save_calls([("mm", 0)]),
        so.policies.save_mm_shapes([(4, 8)]),
    ]


def heads(x: Tensor, weight: Tensor, target: Tensor, teacher: Tensor) -> Tensor:
    loss: Tensor = so.linear_cross_entropy(x, weight, target, memory_budget="64MiB")
    _, lse = so.linear_cross_entropy(x, weight, target, returns=("loss", "lse"))
    kl: Tensor = so.linear_kl_div(x, weight, teacher, weight, divergence="jsd")
    module = so.LinearCrossEntropyLoss(4, 10)
    from_module: Tensor = module(x, target)
    plan = so.plan(8192, 4096, 128256, "bf16", memory_budget="400MiB")
    print(plan.strategy, lse)
    return loss + kl + from_module


def losses(x: Tensor, weight: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
    paired: Tensor = so.losses.dpo(x, weight, target, ref_logps=advantages)
    paired = paired + so.losses.orpo(x, weight, target) + so.losses.cpo(x, weight, target)
    paired = paired + so.losses.simpo(x, weight, target)
    paired = paired + so.losses.kto(x, weight, target, advantages > 0)
    paired = paired + so.losses.kd(x, weight, x, weight, target) + so.losses.sft(x, weight, target)
    rl: Tensor = so.losses.grpo(x, weight, target, advantages)
    rl = rl + so.losses.dapo(x, weight, target, advantages)
    rl = rl + so.losses.gspo(x, weight, target, advantages)
    rl = rl + so.losses.dr_grpo(x, weight, target, advantages)
    return paired + rl


def huggingface(model: nn.Module, plan: so.FitPlan) -> list[Any]:
    patch = so.patch_causal_lm(model, returns=("loss", "nll"))
    so.unpatch_causal_lm(model)
    callbacks = [integrations.trainer_callback(plan)]
    return [patch, *callbacks, integrations.lightning_callback("fit.json")]


def graphs(gm: fx.GraphModule, x: Tensor) -> int:
    explanation: so.autochunk.Explanation = so.autochunk.explain(torch.sum, x, num_chunks=4)
    try:
        so.autochunk.chunk(gm, num_chunks=4)
    except so.autochunk.ChunkError:
        print(explanation.reason)
    step: so.graph.TracedStep = so.graph.trace_step(torch.sum, x)
    found: so.graph.Schedule = so.graph.schedule(so.graph.remat(gm))
    captured, generators = so.graph.capturable(gm)
    print(step, so.graph.regions, captured, len(generators))
    return found.peak_bytes


def memory(model: nn.Module, x: Tensor, path: Path) -> int:
    with so.memory.measure("cpu", model=model) as m, so.memory.limit("4 GiB"):
        model(x)
    m.plot(path)
    measurement: so.memory.Measurement = m
    samples: list[so.memory.Sample] = m.timeline
    lives: list[so.memory.Life] = m.lives
    _, axes = matplotlib.pyplot.subplots()
    so.memory.plot_timelines(axes, {"step": measurement})
    estimated: so.memory.Estimate = so.memory.estimate(model, x)
    step: so.memory.StepEstimate = so.memory.simulate_step(model, x, optimizer=torch.optim.SGD)
    report: so.memory.FitReport = so.memory.will_it_fit(model, x, budget="80GiB", device="h100")
    with so.memory.explain_oom() as told:
        oom: so.memory.OomReport = told
    print(samples, lives, oom.by_owner, report.fits)
    return estimated.peak_bytes + step.peak_bytes


def fitting(model: nn.Module, x: Tensor, path: Path) -> so.FitPlan:
    plan: so.FitPlan = so.fit(model, x, budget="70GiB", optimizer=torch.optim.AdamW)
    plan.apply()
    plan.undo()
    plan.save(path)
    print(so.info()["storage_path"], plan.peak_bytes, plan.seconds)
    return so.load_fit(path, model)
