"""Types of options name the arguments of functions, and checks accept the same names."""

import inspect
import re
from typing import get_args

import pytest
import torch

import storage_ops as so
from storage_ops.checkpoint.discard import output_discard
from storage_ops.checkpoint.layers import config
from storage_ops.checkpoint.region import options
from storage_ops.checkpoint.selective import policies
from storage_ops.divergence import checks
from storage_ops.fitting import actions
from storage_ops.integrations import transformers
from storage_ops.loss import call
from storage_ops.loss.call import CallOptions, ModuleOptions
from storage_ops.loss.planning import problem
from storage_ops.losses import options as of_losses
from storage_ops.losses import sequences

OF_LAYERS = {"layer_classes", "layer_names", "every_k", "allow_no_match"}


def keywords(function, *without):
    """Return the names of the keyword-only arguments of a function."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - set(without)


def arguments(function, *without):
    return set(inspect.signature(function).parameters) - set(without)


LOSS = keywords(so.linear_cross_entropy, "returns")
# Options that a loss of log-probabilities refuses.
REFUSED = {*sequences._OF_RESULTS, *sequences._OF_THE_LOSS}
RETURNS = "return_logps", "return_metrics"
SCORED = (LOSS - REFUSED) | {"cu_seqlens"}


@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        (CallOptions, LOSS),
        (
            ModuleOptions,
            LOSS - {"linear_bias", "weight", "token_weight", "accumulate_into"},
        ),
        (of_losses.SequenceOptions, SCORED),
        (of_losses.PreferenceOptions, SCORED | keywords(so.losses.dpo, *RETURNS)),
        (of_losses.JudgedOptions, SCORED | keywords(so.losses.kto, *RETURNS)),
        (of_losses.OddsOptions, SCORED | keywords(so.losses.orpo, *RETURNS)),
        (of_losses.MarginOptions, SCORED | keywords(so.losses.simpo, *RETURNS)),
        (of_losses.ContrastiveOptions, SCORED | keywords(so.losses.cpo, *RETURNS)),
        (
            of_losses.PolicyOptions,
            (SCORED - {"logit_scale"}) | keywords(so.losses.grpo, *RETURNS),
        ),
        (
            of_losses.SupervisedOptions,
            LOSS - keywords(so.losses.sft) - {"selected_ids", "top_k"},
        ),
        (
            of_losses.SftOptions,
            (LOSS - {"selected_ids", "top_k"}) | keywords(so.losses.sft, *RETURNS),
        ),
        (
            of_losses.DistillationOptions,
            keywords(so.linear_kl_div, "reduction", "token_weight", "scale_by_temperature")
            - keywords(so.losses.kd) - {"target", "target_weight"},
        ),
        (
            of_losses.KdOptions,
            (keywords(so.linear_kl_div, "reduction", "token_weight", "scale_by_temperature")
             - {"target", "target_weight"}) | keywords(so.losses.kd, *RETURNS),
        ),
        (output_discard.DiscardOptions, arguments(so.OutputDiscardCheckpoint)),
        (config.LayerOptions, arguments(so.ActivationCheckpointConfig) - OF_LAYERS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_typed_options_are_the_arguments_of_functions(typed, taken):
    assert set(typed.__annotations__) == taken


X, W, TARGET = torch.randn(2, 3, 4), torch.randn(5, 4), torch.zeros(2, 3, dtype=torch.long)
LAYERS = torch.nn.Sequential(torch.nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("type_", "function", "args", "option"),
    [
        (problem.Reduction, so.linear_cross_entropy, (X, W, TARGET), {"reduction": "?"}),
        (call.InputGrad, so.linear_cross_entropy, (X, W, TARGET), {"input_grad": "?"}),
        (call.Result, so.linear_cross_entropy, (X, W, TARGET), {"returns": ("?",)}),
        (problem.Reduction, so.plan, (8, 4, 16), {"reduction": "?", "device": "h100"}),
        (problem.Grad, so.plan, (8, 4, 16), {"grads": ("?",), "device": "h100"}),
        (problem.Reduction, so.linear_kl_div, (X, W, X, W), {"reduction": "?"}),
        (checks.Divergence, so.linear_kl_div, (X, W, X, W), {"divergence": "?"}),
        (checks.Tail, so.linear_kl_div, (X, W, X, W), {"teacher_tail": "?"}),
        (of_losses.LossType, so.losses.dpo, (X, W, TARGET), {"loss_type": "?"}),
        (of_losses.PolicyLossType, so.losses.grpo, (X, W, TARGET, X[:, 0, 0]), {"loss_type": "?"}),
        (of_losses.Importance, so.losses.grpo, (X, W, TARGET, X[:, 0, 0]), {"importance": "?"}),
        (of_losses.Normalize, so.losses.grpo, (X, W, TARGET, X[:, 0, 0]), {"normalize": "?"}),
        (of_losses.Estimator, so.losses.grpo, (X, W, TARGET, X[:, 0, 0]), {"kl_estimator": "?"}),
        (config.Mode, so.ActivationCheckpointConfig, (), {"mode": "?"}),
        (options.DeterminismCheck, so.ActivationCheckpointConfig, (), {"determinism_check": "?"}),
        (options.DeterminismCheck, so.OutputDiscardCheckpoint, (), {"determinism_check": "?"}),
        (policies.PolicyName, so.ActivationCheckpointConfig, (), {"policy": "?"}),
        (actions.ActionName, so.fit, (LAYERS, X, "1GiB"), {"actions": ["?"]}),
        (transformers.Logits, so.patch_causal_lm, (LAYERS,), {"logits": "?"}),
        (transformers.PatchResult, so.patch_causal_lm, (LAYERS,), {"returns": ("?",)}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_error_for_a_wrong_name_lists_all_names_of_the_type(type_, function, args, option):
    with pytest.raises(ValueError, match=next(iter(option))) as raised:
        function(*args, **option)
    assert len(get_args(type_)) > 1
    for name in get_args(type_):
        assert re.search(rf"\b{name}\b", str(raised.value)), name
