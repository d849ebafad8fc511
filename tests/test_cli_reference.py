"""`--reference`: steps of DPO and GRPO with a frozen reference model."""

import argparse
import copy
import json

import pytest
import torch
from torch.nn import functional as F

import storage_ops.simulate.step as simulated
from storage_ops.cli import main
from storage_ops.cli.reference import loss_of, reference_of, with_reference
from storage_ops.memory import simulate_step
from tests import hf_config
from tests.commands import refused

tf = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def command(tmp_path):
    config = hf_config.write(tmp_path, **SIZES)
    return ["will-it-fit", "--hf-config", config, "--seq", "16"]


def answer(command, capsys):
    assert main([*command, "--json"]) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    return json.loads(out), err


def build(dtype=torch.float64):
    config = tf.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    return tf.LlamaForCausalLM(config).to(dtype)


def logps(model, ids):
    logits = model(input_ids=ids).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_the_loss_equals_that_of_plain_torch(name):
    model, ids = build(), torch.randint(128, (4, 16))
    plain, frozen = copy.deepcopy(model), build()
    with_reference(model, argparse.Namespace(reference=name, tensor_parallel=1))
    reference_of(model).load_state_dict(frozen.state_dict())
    loss = loss_of(model(input_ids=ids, labels=ids))
    loss.backward()
    ours, theirs = logps(plain, ids), logps(frozen, ids).detach()
    if name == "dpo":
        chosen, rejected = (ours - theirs).sum(-1).chunk(2)
        expected = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
    else:
        gap = theirs - ours
        expected = (-(ours - ours.detach()).exp() + 0.04 * (gap.exp() - gap - 1)).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for p, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad)


@pytest.mark.in_turn
@pytest.mark.parametrize(("name", "sequences"), [("dpo", 2), ("grpo", 1)])
def test_an_untrained_copy_of_the_model_is_in_memory(name, sequences, command, capsys):
    plain, _ = answer([*command, "--batch", str(sequences)], capsys)
    compared, said = answer([*command, "--reference", name], capsys)
    assert "the reference is a frozen copy" in said and f"losses.{name}" in said
    for owner, times in (("parameters", 2), ("optimizer state", 1), ("batch", 1)):
        assert compared["by_owner"][owner] == times * plain["by_owner"][owner]


@pytest.mark.in_turn
def test_the_reference_of_adapters_is_the_model_without_them(command, capsys):
    pytest.importorskip("peft")
    command = [*command, "--lora", "4"]
    plain, _ = answer([*command, "--batch", "2"], capsys)
    compared, said = answer([*command, "--reference", "dpo"], capsys)
    assert "the model without its adapters" in said
    assert compared["by_owner"]["parameters"] == plain["by_owner"]["parameters"]


@pytest.mark.in_turn
def test_the_reference_is_sharded_too(command, capsys):
    command = [*command, "--gpus", "4"]
    plain, _ = answer([*command, "--batch", "2"], capsys)
    compared, _ = answer([*command, "--reference", "dpo"], capsys)
    assert compared["by_owner"]["parameters"] == 2 * plain["by_owner"]["parameters"]


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_reused_simulations_of_equal_layers_change_no_number(name, monkeypatch):
    def step():
        with torch.device("meta"):
            model = build(torch.bfloat16)
            ids = torch.empty(4, 16, dtype=torch.int64)
        with_reference(model, argparse.Namespace(reference=name, tensor_parallel=1))
        batch = {"input_ids": ids, "labels": ids}
        return simulate_step(model, batch, loss=loss_of, optimizer=torch.optim.AdamW)

    quick = step()
    monkeypatch.setattr(simulated, "_quickly", lambda *_: None)
    assert quick.by_owner == step().by_owner


@pytest.mark.in_turn
def test_plans_are_for_the_policy_and_apply_to_the_plain_model(command, tmp_path, capsys):
    plan = tmp_path / "fit.json"
    options = ["--reference", "dpo", "--batch", "16", "--optimizer", "adamw", "--save", str(plan)]
    assert main(["fit", *command[1:], *options, "--budget", "1GiB"]) == 0
    printed = capsys.readouterr().out
    assert "model.layers" in printed and "linear_cross_entropy" not in printed
    assert "reference" not in plan.read_text()


def test_models_without_a_reference(command, tmp_path, capsys):
    command = [*command, "--reference", "dpo"]
    assert "but --serve trains nothing" in refused([*command, "--serve"], capsys)
    error = refused(["fit", *command[1:], "--actions", "linear_cross_entropy"], capsys)
    assert "the loss of --reference dpo has no logits" in error
    error = refused([*command, "--gpus", "2", "--tensor-parallel", "2"], capsys)
    assert "takes whole heads" in error
    bert = {**SIZES, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
    other = hf_config.write(tmp_path, **bert)
    error = refused(["will-it-fit", "--hf-config", other, *command[3:]], capsys)
    assert "is of a BertForMaskedLM. Pass the config of a causal" in error
    function = ["will-it-fit", "--model", "model.py:make", *command[5:]]
    assert "--reference is dpo, but the function of --model" in refused(function, capsys)
