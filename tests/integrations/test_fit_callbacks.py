"""Callbacks of trainers that apply a plan."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops
from storage_ops.integrations import lightning_callback, trainer_callback

transformers = pytest.importorskip("transformers")


def tiny(vocabulary=64):
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=vocabulary, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def tiny_plan(model):
    ids = torch.randint(0, 64, (2, 32))
    batch = {"input_ids": ids, "labels": ids}
    none = storage_ops.memory.simulate_step(model, batch).peak_bytes
    return storage_ops.fit(model, batch, int(none * 0.8))


def changed(model):
    return [
        isinstance(m, storage_ops.CheckpointWrapper)
        for m in model.modules()
        if type(m).__name__ == "LlamaDecoderLayer"
    ]


@pytest.mark.in_turn
@pytest.mark.parametrize("from_file", [True, False])
def test_a_plan_is_applied_while_a_trainer_trains(from_file, tmp_path):
    model = tiny()
    plan = tiny_plan(model)
    plan.save(tmp_path / "fit.json")
    callback = trainer_callback(tmp_path / "fit.json" if from_file else plan)
    assert isinstance(callback, transformers.TrainerCallback)
    if from_file:
        model = tiny().eval()  # from_pretrained returns a model in eval mode
    handler = transformers.trainer_callback.CallbackHandler([callback], model, None, None, None)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    handler.on_train_begin(None, state, control)
    assert any(changed(model))
    handler.on_train_begin(None, state, control)  # the trainer starts a second time
    handler.on_train_end(None, state, control)
    assert not any(changed(model))


@pytest.mark.in_turn
def test_a_training_after_one_that_ended_with_an_error(tmp_path):
    """Such a training has no on_train_end. The next one may be of another model."""
    first, second = tiny(), tiny()
    tiny_plan(first).save(tmp_path / "fit.json")
    of_file = trainer_callback(tmp_path / "fit.json")
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    for model in (first, second):
        of_file.on_train_begin(None, state, control, model=model)
    assert any(changed(second)) and not any(changed(first))
    of_file.on_train_end(None, state, control)
    plan = tiny_plan(first)
    of_plan = trainer_callback(plan)
    for _ in range(2):
        of_plan.on_train_begin(None, state, control, model=first)
        assert any(changed(first))
        plan.undo()  # by the user
    of_plan.on_train_end(None, state, control)
    assert not any(changed(first))


@pytest.mark.in_turn
def test_a_trainer(tmp_path):
    pytest.importorskip("accelerate")
    model = tiny()
    plan = tiny_plan(model)
    seen = []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(any(changed(model))))
    data = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(4)]
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(tmp_path),
            max_steps=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            per_device_train_batch_size=2,
        ),
        train_dataset=data,
        callbacks=[trainer_callback(plan)],
    )
    trainer.train()
    assert seen and all(seen) and not any(changed(model))


@pytest.mark.in_turn
@pytest.mark.parametrize("options", [{"bf16": True}, {"neftune_noise_alpha": 5.0}], ids=str)
def test_changes_by_a_trainer_do_not_invalidate_a_plan(tmp_path, options):
    """For example, Accelerate replaces the forward of the model for mixed precision."""
    pytest.importorskip("accelerate")
    # Older transformers enter autocast outside of the model, where the callback compares it.
    with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in options):
        tiny_plan(tiny()).save(tmp_path / "fit.json")
    data = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(4)]
    weights = []
    for callbacks in ([], [trainer_callback(tmp_path / "fit.json")]):
        torch.manual_seed(0)
        model, seen = tiny(), []
        model.model.layers[0].register_forward_hook(
            lambda *_, seen=seen, model=model: seen.append(any(changed(model)))
        )
        args = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            per_device_train_batch_size=2,
            **options,
        )
        transformers.Trainer(model, args, train_dataset=data, callbacks=callbacks).train()
        assert seen and all(is_changed is bool(callbacks) for is_changed in seen)
        weights.append(list(model.parameters()))
    assert all(map(torch.equal, *weights))


@pytest.mark.in_turn
def test_a_plan_with_the_loss_in_mixed_precision(tmp_path):
    """Accelerate wraps the forward of the model before the callback patches the model."""
    pytest.importorskip("accelerate")
    data = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(4)]
    batch = {key: torch.arange(32).expand(2, 32) for key in data[0]}
    with torch.autocast("cpu", torch.bfloat16):
        fitted = tiny(4096)
        budget = int(0.8 * storage_ops.memory.simulate_step(fitted, batch).peak_bytes)
        plan = storage_ops.fit(fitted, batch, budget, actions=["linear_cross_entropy"])
        plan.save(tmp_path / "fit.json")
    losses = []
    for callbacks in ([], [trainer_callback(tmp_path / "fit.json")]):
        torch.manual_seed(0)
        model, seen = tiny(4096), []
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, report_to=[], use_cpu=True, save_strategy="no", bf16=True,
            per_device_train_batch_size=2, logging_steps=1, optim="sgd", learning_rate=0.1,
        )  # fmt: skip
        trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=callbacks)
        model.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out.logits))
        trainer.train()
        assert len(seen) == 3 and all((logits is None) is bool(callbacks) for logits in seen)
        losses.append([x["loss"] for x in trainer.state.log_history if "loss" in x])
        assert type(model) is transformers.LlamaForCausalLM
        assert not hasattr(vars(model).get("forward"), "_replaced")
        assert model(**batch).logits is not None
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_lightning_trainer(package):
    lightning = pytest.importorskip(package)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(
                *(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3))
            )
            self.seen = []

        def training_step(self, batch, index):
            self.seen.append(any(isinstance(m, storage_ops.CheckpointWrapper) for m in self.model))
            return F.mse_loss(self.model(batch), batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module, x = Module(), torch.randn(4, 64, 32)
    search = storage_ops.fitting.search.Search(module.model, x)
    plan = search.plan(search.problem.peak(search.problem.smallest()))
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[lightning_callback(plan, "model")],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(4, 64, 32), 2))
    assert module.seen == [True, True]
    assert not any(isinstance(m, storage_ops.CheckpointWrapper) for m in module.model)


def test_the_callback_is_of_the_package_that_the_program_imports(monkeypatch, tmp_path):
    """`lightning` installs `pytorch_lightning` too, whose Trainer may refuse its callbacks."""
    (tmp_path / "fit.json").touch()
    packages = [pytest.importorskip(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    for package in packages:
        (other,) = {package.__name__ for package in packages} - {package.__name__}
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, other)
            assert isinstance(lightning_callback(tmp_path / "fit.json"), package.Callback)


def test_an_unknown_attribute_of_a_lightning_module_is_refused(tmp_path):
    pytest.importorskip("lightning")
    (tmp_path / "fit.json").touch()
    callback = lightning_callback(tmp_path / "fit.json", "net")
    with pytest.raises(ValueError, match=r"`attribute` is 'net', but ModuleDict.*such as model, b"):
        callback.on_fit_start(None, nn.ModuleDict({"model": nn.Linear(2, 2), "b": nn.ReLU()}))


def test_a_missing_file_is_refused_at_once(tmp_path):
    for make in (trainer_callback, lightning_callback):
        for path in (tmp_path / "no.json", str(tmp_path)):
            with pytest.raises(FileNotFoundError, match=r"`plan` is '.*, but there is no such"):
                make(path)


@pytest.mark.in_turn
def test_the_package_imports_neither_transformers_nor_lightning():
    code = (
        "import sys, storage_ops.integrations as i\n"
        "print([n for n in sys.modules if n.split('.')[0] in "
        "('transformers', 'lightning', 'pytorch_lightning')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_wrong_types_are_refused(tmp_path):
    (tmp_path / "fit.json").touch()
    for make in (trainer_callback, lightning_callback):
        with pytest.raises(TypeError, match=r"`plan` is a int\. Expected"):
            make(3)
    with pytest.raises(TypeError, match=r"`attribute` is a Linear\. Expected the name"):
        lightning_callback(tmp_path / "fit.json", nn.Linear(2, 2))


@pytest.mark.in_turn
def test_a_plan_of_another_model_is_refused():
    plan, other = tiny_plan(tiny()), tiny()
    handler = transformers.trainer_callback.CallbackHandler(
        [trainer_callback(plan)], other, None, None, None
    )
    with pytest.raises(ValueError, match="`plan` was made for another object than the Llama"):
        handler.on_train_begin(None, transformers.TrainerState(), transformers.TrainerControl())
    assert not any(changed(other))


@pytest.mark.in_turn
def test_a_plan_is_for_eager_attention_or_for_others(tmp_path):
    """Eager attention keeps the weights of every pair of tokens."""
    model = tiny()
    tiny_plan(model).save(tmp_path / "fit.json")
    model.config._attn_implementation = "flex_attention"
    storage_ops.load_fit(tmp_path / "fit.json", model)
    model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="which differs in: settings of layers"):
        storage_ops.load_fit(tmp_path / "fit.json", model)


def test_frozen_modules_stay_frozen_in_lightning():
    pytest.importorskip("lightning")
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 64), nn.GELU()))
    model[0].eval()
    plan = storage_ops.fit(model, torch.randn(4, 8), "1GiB")
    holder = nn.ModuleDict({"model": model})
    callback = lightning_callback(plan, "model")
    callback.on_fit_start(None, holder)
    assert plan._is_applied and not model[0].training
    callback.on_fit_end(None, holder)
