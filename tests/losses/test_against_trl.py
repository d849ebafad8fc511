"""Losses and metrics equal those of TRL's trainers, which get stand-ins for their models."""

import collections
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from storage_ops import losses
from storage_ops.losses.options import LOSS_TYPES

trl = pytest.importorskip("trl", minversion="1.16")

B, T, D, V = 4, 7, 6, 11


class Accelerator:
    """An accelerator with one process."""

    device, num_processes, sync_gradients = torch.device("cpu"), 1, True

    def gather(self, values):
        return values

    def gather_for_metrics(self, values):
        return values

    def reduce(self, values, reduction):
        return values


def trainer(**attributes):
    """Return an object with the attributes that methods of a trainer read."""
    default = {
        "accelerator": Accelerator(), "model": torch.nn.Identity(), "aux_loss_enabled": False,
        "_metrics": {"train": collections.defaultdict(list)}, "_total_train_tokens": 0,
        "_tp_size": 1, "args": SimpleNamespace(),
    }  # fmt: skip
    return SimpleNamespace(**{**default, **attributes})


@pytest.fixture
def batch():
    """Return hidden states, head, tokens (2 B, T), targets, mask, log-probabilities, entropies."""
    x = torch.randn(2 * B, T, D, dtype=torch.float64, requires_grad=True)
    w = torch.randn(V, D, dtype=torch.float64)
    tokens = torch.randint(V, (2 * B, T))
    target = tokens.clone()
    for row in target:
        row[: int(torch.randint(1, 4, ()))] = -100
    log_p = torch.log_softmax(x @ w.T, -1)[:, :-1]
    mask = target[:, 1:] != -100
    logps = torch.where(mask, log_p.gather(2, tokens[:, 1:, None])[..., 0], 0)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return x, w, tokens, target, mask, logps, entropy


def same(x, ours, theirs):
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, x, retain_graph=True)[0]
                                 for loss in (ours, theirs)))  # fmt: skip


def dpo_of_trl(batch, reference, loss_type, **options):
    _, _, tokens, _, mask, logps, entropy = batch
    outputs = SimpleNamespace(
        log_probs=logps, entropy=entropy, mean_logits=entropy, is_top1=mask.clone()
    )
    one = trainer(
        loss_types=[loss_type, "sft"], loss_weights=[1.0, options.pop("sft")], ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", use_weighting=False,
        args=SimpleNamespace(discopop_tau=0.05), **options,
    )  # fmt: skip
    chosen, rejected = reference.chunk(2)
    inputs = {
        "input_ids": tokens, "attention_mask": torch.ones_like(tokens),
        "completion_mask": F.pad(mask, (1, 0)).long(),
        "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
    }  # fmt: skip
    loss = trl.DPOTrainer._compute_loss(one, lambda **_: outputs, inputs, False)
    return loss, one._metrics["train"]


def test_dpo(batch):
    x, w, _, target, _, logps, _ = batch
    reference = logps.detach().sum(1) + 3 * torch.randn(2 * B).double()
    for name in (*LOSS_TYPES, "sigmoid_norm"):
        e = 0.1 if name in ("robust", "exo_pair", "aot", "aot_unpaired") else 0.0
        options = {"beta": 0.3, "label_smoothing": e}
        theirs, logs = dpo_of_trl(batch, reference, name, sft=0.4, **options)
        normalized = name in ("ipo", "sigmoid_norm")
        ours, metrics = losses.dpo(
            x, w, target, loss_type=name.removesuffix("_norm"), rpo_alpha=0.4, shift=True,
            length_normalize=normalized, ref_logps=reference, return_metrics=True, **options,
        )  # fmt: skip
        same(x, ours, theirs)
        if not normalized:  # TRL logs rewards of sums with it too
            shared = metrics.keys() & logs.keys()
            assert len(shared) == 6
            for key in shared:
                assert float(metrics[key]) == pytest.approx(logs[key][0], rel=1e-6), key


def grpo_of_trl(batch, **options):
    _, _, tokens, _, mask, logps, entropy = batch
    default = {
        "loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0,
        "importance_sampling_level": "token", "max_completion_length": 9,
    }  # fmt: skip
    inputs = {
        "prompt_ids": tokens[:, :1], "prompt_mask": torch.ones_like(tokens[:, :1]),
        "completion_ids": tokens[:, 1:], "completion_mask": mask.long(),
        **options.pop("inputs"),
    }  # fmt: skip
    names = ("delta", "sapo_temperature_pos", "sapo_temperature_neg")
    args = {name: options.pop(name, 1.0 if "sapo" in name else None) for name in names}
    one = trainer(
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, _entropy_bonus_enabled=False,
        use_vllm="importance_sampling_ratio" in inputs, vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(use_bias_correction_kl=False, steps_per_generation=1, **args),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropy, None),
        **{**default, **options},
    )  # fmt: skip
    return trl.GRPOTrainer._compute_loss(one, None, inputs), one._metrics["train"]


GRPO = {
    "grpo": ({}, {}),
    "delta": ({"delta": 1.3, "epsilon_high": 0.1}, {"delta": 1.3, "clip_high": 0.1}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"normalize": "length", "max_length": 9}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"normalize": "token",
             "clip_high": 0.28, "num_items_in_batch": 31}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.4}, {"loss_type": "cispo", "clip_high": 0.4,
              "normalize": "token", "num_items_in_batch": 31}),
    "sapo": ({"loss_type": "sapo", "sapo_temperature_neg": 1.2}, {"loss_type": "sapo",
             "sapo_temperature_neg": 1.2}),
    "kl": ({"beta": 0.2}, {"kl_weight": 0.2}),
    "gspo": ({"importance_sampling_level": "sequence"}, {"importance": "sequence"}),
}  # fmt: skip


def test_grpo(batch):
    x, w, _, target, mask, logps, _ = batch
    advantages = torch.randn(2 * B).double()
    stored = [logps.detach() + 0.3 * torch.randn(logps.shape).double() * mask for _ in range(2)]
    ratio = torch.rand(logps.shape).double() * 2
    for name, (theirs, options) in GRPO.items():
        inputs = {
            "advantages": advantages, "old_per_token_logps": stored[0],
            "ref_per_token_logps": stored[1], "num_items_in_batch": torch.tensor(31),
        }  # fmt: skip
        if name != "gspo":
            inputs["importance_sampling_ratio"] = ratio
            options = {"importance_sampling_ratio": ratio, **options}
        loss, logs = grpo_of_trl(batch, inputs=inputs, **theirs)
        ours, metrics = losses.grpo(
            x, w, target, advantages, old_logps=stored[0], ref_logps=stored[1], shift=True,
            return_metrics=True, **options,
        )  # fmt: skip
        same(x, ours, loss)
        shared = metrics.keys() & logs.keys()
        shared -= {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"} if (
            name == "gspo"  # TRL logs ratios of sequences, and the package ratios of tokens
        ) else set()  # fmt: skip
        assert "entropy" in shared
        for key in shared:
            assert float(metrics[key]) == pytest.approx(logs[key][0], abs=1e-6), key
        if name == "cispo":
            logged = float(metrics["clip_ratio/high_mean"])
            assert logged == pytest.approx(logs["cispo_clip_ratio"][0], abs=1e-6)


def test_losses_without_a_reference(batch):
    cpo = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    orpo = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    x, w, _, target, mask, logps, _ = batch
    count = mask.sum(1)
    nll = -logps[:B].sum() / count[:B].sum()
    for normalized in (False, True):
        chosen, rejected = (logps.sum(1) / (count if normalized else 1)).chunk(2)
        one = trainer(alpha=0.0, beta=0.3, loss_type="sigmoid", label_smoothing=0.1)
        losses_of_pairs = cpo.cpo_loss(one, chosen, rejected)[0]
        ours = losses.cpo(x, w, target, beta=0.3, label_smoothing=0.1, shift=True,
                          length_normalize=normalized)  # fmt: skip
        same(x, ours, losses_of_pairs.mean() + nll)
    ratios, *rewards, ratio, odds = orpo.odds_ratio_loss(trainer(beta=0.3), chosen, rejected)
    ours, metrics = losses.orpo(x, w, target, beta=0.3, shift=True, return_metrics=True)
    torch.testing.assert_close(ours, (nll - ratios.mean()).double(), rtol=1e-5, atol=1e-6)
    got = [metrics["rewards"], metrics["log_odds_ratio"], metrics["log_odds_chosen"]]
    right = [torch.cat(rewards), ratio.detach(), odds.detach()]
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b.double(), rtol=1e-5, atol=1e-6)


def test_kto(batch):
    x, w, tokens, target, mask, logps, entropy = batch
    good = torch.tensor([True, False] * B)
    reference = logps.detach().sum(1) + 3 * torch.randn(2 * B).double()
    of_kl, its_reference = torch.randn(2, 2 * B).double() + torch.tensor([[0.5], [0.0]])
    outputs = SimpleNamespace(log_probs=logps, entropy=entropy, mean_logits=entropy)
    one = trainer(
        loss_type="kto", beta=0.3, calculate_KL=True, precompute_ref_logps=True,
        desirable_weight=1.2, undesirable_weight=0.7, _compute_kl_logps=lambda *_: of_kl,
    )  # fmt: skip
    inputs = {
        "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "label": good,
        "completion_mask": F.pad(mask, (1, 0)).long(), "ref_logps": reference,
        "ref_KL_logps": its_reference,
    }  # fmt: skip
    theirs = trl.KTOTrainer._compute_loss(one, lambda **_: outputs, inputs, False)
    ours, metrics = losses.kto(
        x, w, target, good, beta=0.3, kl=(of_kl - its_reference).mean().clamp(min=0),
        desirable_weight=1.2, undesirable_weight=0.7, ref_logps=reference, shift=True,
        return_metrics=True,
    )  # fmt: skip
    same(x, ours, theirs)
    logs = one._metrics["train"]
    shared = metrics.keys() & logs.keys()
    assert {"kl", "rewards/chosen", "logps/rejected"} <= shared
    for key in shared:
        assert float(metrics[key]) == pytest.approx(logs[key][0], rel=1e-6), key
