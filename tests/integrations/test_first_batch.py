"""The first batch of a training is compared with the batch of the plan."""

import re
import warnings

import pytest
import torch

import storage_ops
from storage_ops.fitting.conditions import Conditions
from storage_ops.integrations import lightning_callback, trainer_callback
from storage_ops.quantities import parse_bytes, readable
from tests.integrations.test_fit_callbacks import changed, tiny

pytestmark = pytest.mark.in_turn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
SIZE = 2  # sequences in the batch of the plan


def fitted(model, share=0.9, **options):
    ids = torch.randint(0, 64, (SIZE, 32))
    batch = {"input_ids": ids, "labels": ids}
    none = storage_ops.memory.simulate_step(model, batch, **options).peak_bytes
    return storage_ops.fit(model, batch, int(none * share), **options)


def train(folder, plan, model, size=SIZE, **options):
    data = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(16)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=1, report_to=[], use_cpu=True, save_strategy="no",
        per_device_train_batch_size=size, disable_tqdm=True, **options,
    )  # fmt: skip
    seen = []
    # A hook on a layer would make its checkpoint copy the parameters of the whole model.
    embedding = model.model.embed_tokens
    handle = embedding.register_forward_hook(lambda *_: seen.append(changed(model)))
    try:
        callbacks = [trainer_callback(plan)]
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
    finally:
        handle.remove()
        assert not any(changed(model)) and not model._forward_pre_hooks
    return seen


def warned(record):
    return [str(w.message) for w in record if str(w.message).startswith("fit:")]


@pytest.mark.parametrize("from_file", [False, True])
def test_a_larger_batch_is_an_error_before_the_forward(tmp_path, from_file):
    model = tiny()
    plan = fitted(model, optimizer=torch.optim.AdamW)
    ids = torch.zeros(8, 32, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    step = storage_ops.memory.simulate_step(plan.apply(), batch, optimizer=torch.optim.AdamW)
    peak = step.peak_bytes
    plan.undo()
    if from_file:
        plan.save(tmp_path / "fit.json")
        plan = tmp_path / "fit.json"
    with pytest.raises(ValueError, match=r"\(2, 32\), and training begins with .*\(8, 32\)") as e:
        train(tmp_path, plan, model, size=8)
    text = str(e.value)
    said = re.search(r"A step takes ([\d.]+ \w+) now", text)[1]
    assert parse_bytes(said, "peak") == pytest.approx(peak, rel=0.02)  # Trainer also counts tokens
    assert "lower per_device_train_batch_size, which is 8" in text and "optimizer" not in text


def test_a_smaller_batch_is_one_warning(tmp_path):
    model = tiny()
    with pytest.warns(UserWarning) as record:
        seen = train(tmp_path, fitted(model, optimizer=torch.optim.AdamW), model, size=1)
    assert seen == [seen[0]] and any(seen[0])
    (line,) = warned(record)
    assert "(2, 32), and training begins with input_ids (1, 32)" in line
    assert [w.filename for w in record if str(w.message) == line] == [__file__]


def test_the_batch_of_the_plan_causes_no_warning(tmp_path):
    model = tiny()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        train(tmp_path, fitted(model, optimizer=torch.optim.AdamW), model)
    assert not warned(record)


def test_accumulation_that_was_not_planned_is_an_error(tmp_path):
    model = tiny()
    plan = fitted(model)
    with pytest.raises(ValueError, match=r"no gradient accumulation.*with accumulate=True") as e:
        train(tmp_path, plan, model, gradient_accumulation_steps=2)
    assert "The state of the optimizer is not counted" in str(e.value)
    plan = fitted(model, accumulate=True)
    with pytest.warns(UserWarning, match="training begins with no gradient accumulation"):
        train(tmp_path, plan, model)


@pytest.mark.parametrize("launched", [False, True], ids=["an argument", "accelerate launch"])
def test_autocast_is_compared(tmp_path, monkeypatch, launched):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16" if launched else "no")
    model, other = tiny(), tiny()  # the forward of a model keeps the autocast of its Trainer
    with torch.autocast("cpu", torch.bfloat16):
        plan, other_plan = fitted(model, share=1), fitted(other, share=1)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        train(tmp_path, plan, model, bf16=not launched)
    assert not warned(record)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(ValueError, match=r"for autocast to bfloat16, and .* no autocast"):
        train(tmp_path, other_plan, other)


def test_checkpoints_of_the_trainer_are_refused_by_the_name_of_their_argument(tmp_path):
    model = tiny()
    names = transformers.TrainingArguments.__dataclass_fields__
    name = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if n in names)
    with pytest.raises(ValueError, match=rf"`{name}` is True .*TrainingArguments\({name}=False\)"):
        train(tmp_path, fitted(model), model, **{name: True})


def test_a_model_in_eval_mode(tmp_path):
    model = tiny().eval()
    with pytest.warns(UserWarning, match="fit: `model`, a LlamaForCausalLM, is in eval mode"):
        plan = fitted(model)
    with pytest.raises(RuntimeError, match=r"in eval mode then. Call model.train\(\) before fit"):
        train(tmp_path, plan, model)
    plan = fitted(model.train())
    plan.save(tmp_path / "fit.json")
    with pytest.raises(RuntimeError, match=r"is in eval mode. Call model.train\(\) before this"):
        model.eval() and plan.apply()
    with pytest.raises(ValueError, match=r"is in eval mode. Call model.train\(\) before this"):
        storage_ops.load_fit(tmp_path / "fit.json", model)
    with pytest.warns(UserWarning, match="will_it_fit: `model`, a LlamaForCausalLM, is in eval"):
        ids = torch.zeros(1, 4, dtype=torch.long)
        storage_ops.memory.will_it_fit(model, {"input_ids": ids}, device="cpu")


def test_searching_a_plan_prints_no_warning_about_caches():
    model = tiny()
    model.config.use_cache = True
    storage_ops.checkpoint.state.caches._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = fitted(model)
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.warns(UserWarning, match="use_cache=True") as record:
        plan.apply()(input_ids=ids, labels=ids)
    assert record[0].filename == __file__


def test_a_model_whose_embeddings_require_grad_by_a_hook_is_simulated():
    """transformers stores the handle of the hook in an attribute."""
    model, ids = tiny(), torch.zeros(1, 4, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    plain = storage_ops.memory.simulate_step(model, batch).peak_bytes
    model.enable_input_require_grads()
    assert storage_ops.memory.simulate_step(model, batch).peak_bytes >= plain


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 64)))


def test_the_callback_of_lightning_compares_the_batch():
    pytest.importorskip("lightning")
    holder = Holder()
    plan = storage_ops.fit(holder.model, torch.randn(4, 8), "8KiB")
    callback = lightning_callback(plan, "model")
    callback.on_fit_start(None, holder)
    with pytest.raises(ValueError, match=r"input \(4, 8\), and .* input \(64, 8\).* of 8 KiB"):
        holder.model(torch.randn(64, 8))
    assert not plan._is_applied
    callback.on_fit_end(None, holder)


def test_a_larger_step_within_the_budget_is_a_warning():
    pytest.importorskip("lightning")
    holder = Holder()
    step = storage_ops.memory.simulate_step(holder.model, torch.randn(64, 8)).peak_bytes
    now = re.escape(readable(step, up=True))
    plan = storage_ops.fit(holder.model, torch.randn(4, 8), "1MiB")
    callback = lightning_callback(plan, "model")
    callback.on_fit_start(None, holder)
    with pytest.warns(UserWarning, match=rf"takes {now} now.* KiB, and the budget is 1 MiB"):
        holder.model(torch.randn(64, 8))
    assert plan.is_applied
    callback.on_fit_end(None, holder)


def test_conditions_name_every_difference():
    model = Holder()
    model.forward = lambda ids, mask=None, **more: None

    def conditions(*args, accumulate=False, **kwargs):
        return Conditions.of(model, args, kwargs, accumulate, True)

    lists = [torch.zeros(3), torch.zeros(4)]
    before = conditions(torch.zeros(2, 8), extra=lists)
    assert before.shapes == {"ids": (2, 8), "extra[0]": (3,), "extra[1]": (4,)}
    assert Conditions.from_dict(before.as_dict()) == before
    assert before.differences(before) == []
    (d,) = before.differences(conditions(torch.zeros(2, 6), extra=lists))
    assert (d.before, d.now, d.may_be_larger) == ("ids (2, 8)", "ids (2, 6)", False)
    one = conditions(torch.zeros(2, 8))
    (d,) = one.differences(conditions(torch.zeros(2, 8), torch.zeros(2, 8)))
    assert (d.before, d.now, d.may_be_larger) == ("no mask", "mask (2, 8)", True)
    (d,) = one.differences(conditions(torch.zeros(2, 8), accumulate=True))
    assert d.remedy == "with accumulate=True" and d.may_be_larger
