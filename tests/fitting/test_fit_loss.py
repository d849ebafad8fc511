"""Plans that replace the loss of a causal language model of transformers."""

import copy
import re

import pytest
import torch

import storage_ops
from storage_ops.fitting.search import Search
from storage_ops.memory import simulate_step
from tests.fitting.test_fit import measured_peak

pytestmark = pytest.mark.in_turn

transformers = pytest.importorskip("transformers")

ADAM = torch.optim.AdamW
ACTIONS = ["output_discard", "selective", "full", "linear_cross_entropy"]
VOCAB = 4096


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, VOCAB, (2, 128))
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def searched():
    """Return an unchanged model, its batch, and a finished search."""
    model, batch = llama()
    return model, batch, Search(model, batch, optimizer=ADAM, actions=ACTIONS)


@pytest.mark.kernels
def test_plans_with_the_loss(searched):
    model, batch, search = searched
    plain = copy.deepcopy(model)
    plain(**batch).loss.backward()
    exact = Search(model, batch, optimizer=ADAM)
    none = simulate_step(model, batch, optimizer=ADAM).peak_bytes
    smallest = []
    for one_search in (search, exact):
        with pytest.raises(ValueError, match="needs at least") as error:
            one_search.plan(1000)
        smallest.append(int(str(error.value).split("(")[2].split()[0]))
    logits = batch["labels"].numel() * VOCAB * 4
    assert smallest[0] < smallest[1] - logits
    before = None
    for share in (0.0, 0.2, 0.6, 1.0):
        budget = int(smallest[0] + (none - smallest[0]) * share)
        plan = search.plan(budget)
        assert plan.peak_bytes <= budget
        assert before is None or plan.seconds <= before
        before = plan.seconds
        rows = [row for row in plan.rows if "linear_cross_entropy" in row.action]
        if budget < smallest[1]:
            assert len(rows) == 1 and rows[0].names == ["loss"] and rows[0].seconds != 0
            assert "sums in another order" in rows[0].action
        kind = type(model)
        plan.apply()
        assert simulate_step(model, batch, optimizer=ADAM).peak_bytes == plan.peak_bytes
        outputs = model(**batch)
        assert (outputs.logits is None) == bool(rows)
        outputs.loss.backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        model.zero_grad()
        state = copy.deepcopy(model.state_dict())
        assert measured_peak(model, batch) <= budget * 1.01
        model.load_state_dict(state)
        model.zero_grad()
        plan.undo()
        assert type(model) is kind and model(**batch).logits is not None


def test_a_plan_with_the_loss_is_saved_and_loaded(tmp_path, searched):
    _, batch, search = searched
    least = min(way.problem.peak(way.problem.smallest()) for way in search._variants[1:])
    plan = search.plan(int(least * 1.05))
    plan.save(tmp_path / "fit.json")
    other, _ = llama()
    loaded = storage_ops.load_fit(tmp_path / "fit.json", other)
    assert str(loaded) == str(plan)
    loaded.apply()
    assert other(**batch).logits is None
    assert simulate_step(other, batch, optimizer=ADAM).peak_bytes == plan.peak_bytes
    loaded.undo()
    assert other(**batch).logits is not None


def test_a_loss_that_cannot_be_replaced_is_refused():
    model, batch = llama()
    actions = ["linear_cross_entropy"]

    def refuses(message, *args, **kwargs):
        with pytest.raises(ValueError, match=message):
            storage_ops.fit(*args, budget="1GiB", actions=actions, **kwargs)

    refuses("Pass loss=None", model, batch, loss=lambda out: out.loss)
    refuses("a dict with labels", model, batch["input_ids"])
    refuses("without get_output_embeddings", torch.nn.Linear(4, 4), {"labels": batch["labels"]})


def test_the_error_names_the_loss_that_needs_no_logits():
    model, batch = llama()
    with pytest.raises(
        ValueError, match=r"needs at least .*'linear_cross_entropy'\] to do without the log"
    ):
        storage_ops.fit(model, batch, "24KiB", actions=["full"])
    with pytest.raises(ValueError, match=r"needs at least .* A number without a unit"):
        storage_ops.fit(model, batch, "24", actions=["full", "linear_cross_entropy"])
    with pytest.raises(ValueError, match=r"needs at least [^;]*$"):
        storage_ops.fit(model, batch["input_ids"], "24KiB", actions=["full"])  # there are no labels


def test_a_plan_that_costs_time_names_the_loss_that_needs_no_logits(searched):
    model, batch = llama()
    hint = "'linear_cross_entropy'] to do without the logits"
    search = Search(model, batch)
    none = search.problem.peak([0] * len(search.problem.options))
    assert hint in " ".join(str(search.plan(int(0.9 * none))).split())
    assert hint not in str(search.plan(2 * none))
    with_all, least = searched[-1], min(peak for peak, _ in searched[-1].curve())
    assert hint not in str(with_all.plan(int(1.1 * least)))


def test_a_loss_without_a_gradient_is_refused():
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(2, 4)
    frozen = copy.deepcopy(model).requires_grad_(False)
    for module, loss in ((model, lambda y: y.sum().detach()), (frozen, torch.sum)):
        for call in (storage_ops.fit, storage_ops.memory.will_it_fit):
            with pytest.raises(
                ValueError, match=r"needs no gradient\. Expected a tensor that depends on"
            ):
                call(module, x, "1GiB", loss)


def test_a_plan_does_not_remove_an_earlier_patch(searched):
    _, batch, search = searched
    least = min(way.problem.peak(way.problem.smallest()) for way in search._variants[1:])
    plan = search.plan(int(least * 1.05))
    model = plan.apply()
    plan.undo()
    with storage_ops.patch_causal_lm(model):
        with pytest.raises(RuntimeError, match=r"patched already\. Call unpatch_causal_lm"):
            plan.apply()
        assert model(**batch).logits is None
    plan.apply()
    assert model(**batch).logits is None
    plan.undo()


def test_the_error_names_the_owners_of_the_memory():
    model, batch = llama()
    with pytest.raises(ValueError, match="needs at least") as error:
        storage_ops.fit(model, batch, "1MiB", optimizer=ADAM)
    nbytes = sum(p.nbytes for p in model.parameters())
    parameters, states = (storage_ops.quantities.readable(n) for n in (nbytes, 2 * nbytes))
    assert re.search(
        rf"of parameters {parameters}, (gradients [^,]*, )?optimizer state {states}, activations ",
        str(error.value),
    )


@pytest.mark.parametrize("peft", [False, True])
def test_the_budget_of_a_patched_loss_is_chosen(tmp_path, peft):
    model, batch = llama()
    if peft:
        library = pytest.importorskip("peft")
        model = library.get_peft_model(model, library.LoraConfig(target_modules=["q_proj"])).train()
    storage_ops.patch_causal_lm(model)
    with pytest.raises(
        ValueError, match=r"'linear_cross_entropy'\] to choose the memory budget of t"
    ):
        storage_ops.fit(model, batch, "1KiB", actions=["full"])
    with pytest.raises(ValueError, match="needs at least") as error:
        storage_ops.fit(model, batch, "1KiB", actions=ACTIONS)
    assert "chooses the memory budget" not in str(error.value)
    plan = storage_ops.fit(model, batch, error.value.smallest_bytes, actions=ACTIONS)
    plan.save(tmp_path / "fit.json")
    inner = model.get_base_model() if peft else model
    own, expected = inner._loss_options, model(**batch).loss
    plan.apply()
    chosen = inner._loss_options.memory_budget
    assert chosen and chosen in [
        action.get("memory_budget") for action in plan.as_dict()["actions"]
    ]
    assert simulate_step(model, batch).peak_bytes == plan.peak_bytes
    torch.testing.assert_close(model(**batch).loss, expected)
    with pytest.raises(RuntimeError, match="its budget is that of a plan"):
        storage_ops.fit(model, batch, "1GiB")
    plan.undo()
    assert inner._loss_options is own
    of_layers = storage_ops.fit(model, batch, "1GiB", actions=["full"])  # with the patched loss
    of_layers.save(tmp_path / "layers.json")
    storage_ops.unpatch_causal_lm(model)
    loaded = [storage_ops.load_fit(tmp_path / name, model) for name in ("fit.json", "layers.json")]
    for refused in (plan, of_layers, *loaded):
        with pytest.raises(RuntimeError, match="is for a patched model, and this one is not"):
            refused.apply()
    storage_ops.patch_causal_lm(model)
    for accepted in (plan, of_layers, *loaded):
        accepted.apply()
        accepted.undo()


def test_a_plan_of_a_plain_model_is_valid_with_a_patch():
    """The patched loss takes less memory."""
    model, batch = llama()
    plan = storage_ops.fit(model, batch, "1GiB", actions=["full"])
    with storage_ops.patch_causal_lm(model):
        plan.apply()
        plan.undo()
