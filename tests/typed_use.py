# pyright: strict
"""A user's file with every public name: mypy (`make lint`) and pyright (`make types`) check it.

Both are strict. `test_house.py` compares it with `__all__`. It is checked, not run. `assert_type`
fails where the type of an expression is another one, Any included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from typing_extensions import assert_type

import storage_ops as so
from storage_ops import integrations


def storage(x: Tensor) -> bool:
    so.discard_storage(x, streams=[])
    so.share_storage(x, torch.empty_like(x))
    with so.check_discarded():
        return so.is_discarded(x)


def mlp(x: Tensor, scale: float = 1.0) -> Tensor:
    return F.gelu(x) * scale


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:1], x[1:]


def discarding(producer: nn.Module, consumer: nn.Module, x: Tensor) -> Tensor:
    region = so.OutputDiscardCheckpoint(determinism_check="checksum")
    y = region.checkpoint(producer, x)
    with region.consumer():
        y = consumer(y)
    region.discard_output_and_register_recompute()
    chain = so.OutputDiscardChain()
    module: nn.Module = so.OutputDiscard(producer, consumer)
    called: Tensor = so.output_discard(producer, consumer)(x)
    assert_type(region.checkpoint(mlp, x, scale=2.0), Tensor)
    assert_type(region.checkpoint(halves, x), tuple[Tensor, Tensor])
    assert_type(region.checkpoint(torch.sum, x, dim=1), Tensor)
    assert_type(chain.checkpoint(mlp, x), Tensor)
    assert_type(so.output_discard(mlp, halves)(x, 2.0), tuple[Tensor, Tensor])
    assert_type(so.output_discard(mlp, mlp, determinism_check="none")(x), Tensor)
    assert_type(so.OutputDiscard(mlp, halves)(x), tuple[Tensor, Tensor])
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


def same_class(layers: nn.Sequential, x: Tensor) -> None:
    cfg = so.ActivationCheckpointConfig(layer_names=["0"], mode="full", determinism_check="none")
    assert_type(so.apply_activation_checkpoint(layers, cfg), nn.Sequential)
    assert_type(so.remove_activation_checkpoint(layers), nn.Sequential)
    assert_type(so.tile(layers, tiles=2), nn.Sequential)
    assert_type(so.CheckpointWrapper(layers, ops_to_save=["aten.mm"]), nn.Sequential)
    plan = so.fit(layers, x, "1GiB", actions=["full", "linear_cross_entropy"])
    assert_type(plan, so.FitPlan[nn.Sequential])
    assert_type(plan.apply(), nn.Sequential)
    assert_type(plan.undo(), nn.Sequential)
    assert_type(so.load_fit("plan.json", layers).apply(), nn.Sequential)
    with so.patch_causal_lm(layers, logits="deferred") as patched:
        assert_type(patched, nn.Sequential)
    any_class: so.FitPlan = plan
    print(any_class)


def policies(ctx: Any, op: Any) -> list[so.policies.Policy]:
    kept = so.policies.union(so.policies.matmuls, so.policies.save("aten.mm"))
    so.policies.contexts(so.policies.everything)
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


def results(x: Tensor, weight: Tensor, target: Tensor) -> None:
    loss = so.linear_cross_entropy
    assert_type(loss(x, weight, target), Tensor)
    assert_type(loss(x, weight, target, reduction="none", max_valid="sync"), Tensor)
    assert_type(loss(x, weight, target, returns=("nll",)), Tensor)
    assert_type(loss(x, weight, target, returns=("nll", "lse")), tuple[Tensor, Tensor])
    three = loss(x, weight, target, returns=("loss", "entropy", "correct"))
    assert_type(three, tuple[Tensor, Tensor, Tensor])
    four = loss(x, weight, target, returns=("loss", "entropy", "nll", "z_loss"))
    assert_type(four, tuple[Tensor, ...])
    pair = loss(x, weight, target, returns=("topk",), top_k=5)
    assert_type(pair, tuple[Tensor, Tensor])  # values and classes
    assert_type(loss(x, weight, target, returns=["nll", "topk"], top_k=5), Any)
    region = so.OutputDiscardCheckpoint()
    assert_type(region.checkpoint(so.linear_cross_entropy, x, weight, target), Tensor)
    assert_type(so.linear_kl_div(x, weight, x, weight, reduction="sum"), Tensor)


def modules(x: Tensor, target: Tensor) -> None:
    assert_type(so.LinearCrossEntropyLoss(4, 10)(x, target), Tensor)
    several = so.LinearCrossEntropyLoss(4, 10, reduction="sum", returns=("loss", "lse"))
    assert_type(several(x, target), tuple[Tensor, Tensor])
    head: so.LinearCrossEntropyLoss = so.LinearCrossEntropyLoss(4, 10)
    assert_type(head(x, target, token_weight=x), Tensor)
    assert_type(head.linear, nn.Linear)


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
    with_logps = so.losses.dpo(x, weight, target, loss_type="ipo", return_logps=True)
    assert_type(with_logps, tuple[Tensor, Tensor])
    assert_type(so.losses.dpo(x, weight, target), Tensor)
    assert_type(
        so.losses.dpo(x, weight, target, return_metrics=True), tuple[Tensor, dict[str, Tensor]]
    )
    assert_type(
        so.losses.orpo(x, weight, target, return_metrics=True), tuple[Tensor, dict[str, Tensor]]
    )
    assert_type(
        so.losses.dapo(x, weight, target, advantages, return_metrics=True),
        tuple[Tensor, dict[str, Tensor]],
    )
    assert_type(so.losses.grpo(x, weight, target, advantages, importance="sequence"), Tensor)
    assert_type(
        so.losses.gspo(x, weight, target, advantages, return_logps=True), tuple[Tensor, Tensor]
    )
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
    assert_type(so.graph.trace_step(mlp, x, scale=2.0)(x), Tensor)
    assert_type(so.graph.regions.mark(halves, (x,)), tuple[Tensor, Tensor])
    assert_type(so.autochunk.chunk(gm), fx.GraphModule)
    ordered: so.graph.Schedule = so.graph.schedule(so.graph.remat(gm))
    captured, generators = so.graph.capturable(gm)
    print(step, so.graph.regions, captured, len(generators))
    return ordered.peak_bytes


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
    with so.memory.explain_oom() as explained:
        oom: so.memory.OomReport = explained
    print(samples, lives, oom.by_owner, report.fits)
    return estimated.peak_bytes + step.peak_bytes


def fitting(model: nn.Module, x: Tensor, path: Path) -> so.FitPlan:
    times = so.calibrate("cpu", seconds=10).op_times
    assert_type(times.seconds("aten::mm", "float32", 1e9), float | None)
    plan: so.FitPlan = so.fit(model, x, budget="70GiB", optimizer=torch.optim.AdamW)
    plan.apply()
    plan.undo()
    plan.save(path)
    print(so.info()["storage_path"], plan.peak_bytes, plan.seconds)
    largest = so.find_largest(model, lambda n: x.expand(n, -1), "70GiB", actions=["full"], most=8)
    size: int | None = largest.found
    print(largest, size, largest.planned and largest.planned.plan.seconds)
    return so.load_fit(path, model)
