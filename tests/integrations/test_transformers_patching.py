"""Applying and undoing patch_causal_lm, copies and wrappers of a patched model, and refusals."""

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import types
import warnings
import weakref

import pytest
import torch
from torch import nn

import storage_ops
from storage_ops.integrations import transformers

from .models import GROUPED, D, V, check_against_plain, loss_and_gradients, make, tf


def test_undo(batch):
    model = make("Llama")
    before, head_before = dict(vars(model)), dict(vars(model.lm_head))
    keys = list(model.state_dict())
    expected = model(**batch)
    with storage_ops.patch_causal_lm(model) as same:
        assert same is model and type(model) is not tf.LlamaForCausalLM
        assert isinstance(model, tf.LlamaForCausalLM) and isinstance(model.lm_head, nn.Linear)
        assert list(model.state_dict()) == keys
        model(**batch)
    assert type(model) is tf.LlamaForCausalLM and type(model.lm_head) is nn.Linear
    assert vars(model) == before and vars(model.lm_head) == head_before
    assert torch.equal(model(**batch).logits, expected.logits)
    storage_ops.unpatch_causal_lm(model)  # no effect on a model without a patch
    assert type(model) is tf.LlamaForCausalLM


def test_patching_twice(batch):
    model = make("Llama")
    storage_ops.patch_causal_lm(model)
    patched = type(model)
    with storage_ops.patch_causal_lm(model):
        assert type(model) is patched
    assert type(model) is patched and model(**batch).logits is None  # the outer patch remains
    transformers.set_memory_budget(model, 1 << 20)  # as a plan does
    storage_ops.patch_causal_lm(model)
    with pytest.raises(RuntimeError, match="patched already"):
        storage_ops.patch_causal_lm(model, memory_budget=1 << 20)
    storage_ops.unpatch_causal_lm(model)
    assert type(model) is tf.LlamaForCausalLM


@pytest.mark.in_turn
def test_the_warning_about_returned_logits_names_the_remedy():
    def step(x, w, t):
        z = x @ w.T
        return torch.nn.functional.cross_entropy(z, t), z

    torch._dynamo.reset()
    x, w = torch.randn(512, 8), torch.randn(20_000, 8, requires_grad=True)
    compiled = torch.compile(step, backend="storage_ops")
    with pytest.warns(UserWarning, match=r"is returned.*patch_causal_lm\(model\)"):
        compiled(x, w, torch.randint(20_000, (512,)))[0].backward()


def test_the_signature_stays_the_same_for_trainer_and_generate():
    model = make("Llama")
    bound, plain = inspect.signature(model.forward), inspect.signature(type(model).forward)
    storage_ops.patch_causal_lm(model)
    assert inspect.signature(model.forward) == bound
    assert inspect.signature(type(model).forward) == plain
    assert type(model).__name__ == "LlamaForCausalLM"
    assert str(type(model)) == str(tf.LlamaForCausalLM)


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_copies(clone, batch):
    model = make("Llama")
    expected = model(**batch).loss
    storage_ops.patch_causal_lm(model)
    model(**batch)
    other = clone(model)
    storage_ops.unpatch_causal_lm(model)
    outputs = other(**batch)  # the copy does not depend on the original
    assert outputs.logits is None and other.lm_head is not model.lm_head
    torch.testing.assert_close(outputs.loss, expected)
    storage_ops.unpatch_causal_lm(other)
    assert type(other) is tf.LlamaForCausalLM and type(other.lm_head) is nn.Linear


def test_saved_files(tmp_path, batch):
    model = make("Llama")
    expected = model(**batch).loss
    storage_ops.patch_causal_lm(model)
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is tf.LlamaForCausalLM
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    torch.testing.assert_close(loaded(**batch).loss, expected)


def test_a_new_model_of_the_class_of_a_patched_one(batch):
    model = make("Llama")
    storage_ops.patch_causal_lm(model)
    other = type(model)(model.config).train()
    assert not transformers.is_patched(other)
    assert other(**batch).logits is not None
    check_against_plain(other, lambda model: model(**batch))
    assert type(other) is tf.LlamaForCausalLM
    assert model(**batch).logits is None


def test_a_patched_model_is_freed_without_the_garbage_collector(batch):
    model = make("Llama")
    storage_ops.patch_causal_lm(model)
    model(**batch).loss.backward()
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(model.lm_head)
        del model
        assert gone() is None
    finally:
        gc.enable()


class Wrapper(nn.Module):
    """Calls the forward of a model directly and forwards attributes to it, as PEFT does."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        return self.model.forward(input_ids, attention_mask, labels=labels, **kwargs)


def test_wrappers(batch):
    model = make("Llama")
    expected, logits = model(**batch).loss, model(batch["input_ids"]).logits
    wrapper = Wrapper(model)
    for patched in ([wrapper], [model], [model, wrapper]):
        for module in patched:
            storage_ops.patch_causal_lm(module)
        outputs = wrapper(**batch)
        assert outputs.logits is None
        torch.testing.assert_close(outputs.loss, expected)
        torch.testing.assert_close(wrapper(batch["input_ids"]).logits, logits)
        for module in patched:
            storage_ops.unpatch_causal_lm(module)
        assert type(wrapper) is Wrapper and type(model) is tf.LlamaForCausalLM
        assert type(model.lm_head) is nn.Linear


class TrainedCopy(nn.Module):
    """Calls a copy of a layer and keeps the original, as PEFT's modules_to_save does."""

    def __init__(self, layer):
        super().__init__()
        self.original_module = layer
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(layer)})

    def forward(self, *args):
        return self.modules_to_save["default"](*args)


@pytest.mark.parametrize("patch_first", [True, False])
def test_a_trained_copy_of_the_output_layer(patch_first, batch):
    model = make("Llama")
    if patch_first:
        storage_ops.patch_causal_lm(model)
    model.lm_head = TrainedCopy(model.lm_head)
    storage_ops.patch_causal_lm(model)
    outputs, patched_grads = loss_and_gradients(model, lambda model: model(**batch))
    storage_ops.unpatch_causal_lm(model)
    assert [type(m) for m in model.lm_head.modules()].count(nn.Linear) == 2
    expected, grads = loss_and_gradients(model, lambda model: model(**batch))
    assert outputs.logits is None and expected.logits is not None
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(patched_grads, grads, rtol=1e-5, atol=1e-6)


def test_unpatching_also_affects_a_forward_that_a_wrapper_stored(batch):
    model = make("Llama")
    storage_ops.patch_causal_lm(model)
    kept = type(model).forward
    model.forward = lambda *args, **kwargs: kept(model, *args, **kwargs)  # as accelerate does
    assert model(**batch).logits is None
    storage_ops.unpatch_causal_lm(model)
    assert model(**batch).logits is not None


@pytest.mark.parametrize("patch_first", [True, False])
def test_accelerate_removes_its_own_wrappers(patch_first, batch):
    accelerate = pytest.importorskip("accelerate")
    model = make("Llama")
    expected = copy.deepcopy(model)(**batch).loss
    if patch_first:
        storage_ops.patch_causal_lm(model)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    if not patch_first:
        storage_ops.patch_causal_lm(prepared)
    in_16_bits = prepared(**batch)
    assert in_16_bits.logits is None and in_16_bits.loss != expected
    outputs = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)(**batch)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected)


def test_a_forward_that_is_replaced_later(batch):
    """The first call in training warns that the patch has no effect."""

    def other(self, input_ids, attention_mask=None, labels=None):
        hidden = self.model(input_ids, attention_mask).last_hidden_state
        return self.loss_function(hidden @ self.lm_head.weight.T, labels, V)

    model = make("Llama")
    storage_ops.patch_causal_lm(model)
    before = dict(vars(model))
    model.forward = types.MethodType(other, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model(**batch)
        copied = copy.deepcopy(model)
        with pytest.raises(UserWarning, match=r"LlamaForCausalLM has no effect.*<locals>\.other"):
            model(**batch)
        model(**batch)  # warns only once
        with pytest.raises(UserWarning, match="use_liger_kernel"):
            copied(**batch)
        model.forward = types.MethodType(type(model).forward, model)
        assert model(**batch).logits is None
        model.forward = types.MethodType(other, model)
        storage_ops.unpatch_causal_lm(model)
        model(**batch)
    storage_ops.patch_causal_lm(copied)
    assert not model._forward_hooks and not model._forward_pre_hooks
    del model.forward
    storage_ops.patch_causal_lm(model)
    assert vars(model).keys() == before.keys()


def test_a_new_output_layer(batch):
    model = make("Llama")
    storage_ops.patch_causal_lm(model)
    model.resize_token_embeddings(V + 7)
    assert model.lm_head.out_features == V + 7
    assert model(**batch).logits is None
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(
        TypeError, match=r"output layer of LlamaForCausalLM.* is .*Sequential. Expected"
    ):
        model(**batch)


def test_models_that_cannot_be_patched():
    message = r"`model` is Linear, without get_output_embeddings\(\).*LinearCrossEntropyLoss"
    with pytest.raises(TypeError, match=message):
        storage_ops.patch_causal_lm(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="`model` is dict"):
        storage_ops.patch_causal_lm({})
    with pytest.raises(TypeError, match="unpatch_causal_lm: `model` is 'Llama', a str"):
        storage_ops.unpatch_causal_lm("Llama")
    with pytest.raises(TypeError, match="forward of LlamaModel takes no labels"):
        storage_ops.patch_causal_lm(tf.LlamaModel(tf.LlamaConfig(**GROUPED)))
    classifier = tf.LlamaForSequenceClassification(tf.LlamaConfig(**GROUPED))
    with pytest.raises(TypeError, match=r"of LlamaForSequenceClassification.* is .*NoneType"):
        storage_ops.patch_causal_lm(classifier)
    assert type(classifier) is tf.LlamaForSequenceClassification


class ScaledLinear(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize("needs_all", [False, True])
def test_patching_tries_one_layer_or_all_if_the_model_needs_them(needs_all, monkeypatch):
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**GROUPED, "num_hidden_layers": 4}))
    layer, base = type(model.model.layers[0]), type(model.model)
    layers_of_runs = []
    forward, forward_of_base = layer.forward, base.forward

    def counted(self, *args, **kwargs):
        layers_of_runs[-1] += 1
        return forward(self, *args, **kwargs)

    def begun(self, *args, **kwargs):
        layers_of_runs.append(0)
        if needs_all:
            self.layers[3]
        return forward_of_base(self, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", counted)
    monkeypatch.setattr(base, "forward", begun)
    storage_ops.patch_causal_lm(model)
    assert layers_of_runs == ([0, 4] if needs_all else [1])


def test_an_interrupt_leaves_nothing_behind(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    model = make("Llama")
    before = dict(vars(model))
    monkeypatch.setattr(storage_ops.integrations.transformers, "find_refusal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        storage_ops.patch_causal_lm(model)
    assert type(model) is tf.LlamaForCausalLM and type(model.lm_head) is nn.Linear
    assert vars(model) == before


def test_output_layers_with_hooks_or_another_forward(batch):
    model = make("Llama")
    model.lm_head = ScaledLinear(D, V)
    with pytest.raises(TypeError, match="ScaledLinear with a forward of its own"):
        storage_ops.patch_causal_lm(model)
    model.lm_head = nn.Linear(D, V)
    storage_ops.apply_activation_checkpoint(model, {"layer_names": ["lm_head"]})
    with pytest.raises(TypeError, match=r"is checkpointed or in tiles. .* Patch the model first"):
        storage_ops.patch_causal_lm(model)
    storage_ops.remove_activation_checkpoint(model)
    model.lm_head.forward = lambda input: 2 * input
    with pytest.raises(RuntimeError, match="output layer of LlamaForCausalLM was replaced"):
        storage_ops.patch_causal_lm(model)
    del model.lm_head.forward
    assert type(model.lm_head) is nn.Linear
    handle = model.lm_head.register_forward_hook(lambda *args: None)
    with pytest.raises(RuntimeError, match="LlamaForCausalLM has forward or backward hooks"):
        storage_ops.patch_causal_lm(model)
    handle.remove()
    assert type(model) is tf.LlamaForCausalLM
    storage_ops.patch_causal_lm(model)
    model.lm_head.register_full_backward_hook(lambda *args: None)
    with pytest.raises(RuntimeError, match="hooks"):
        model(**batch)


def test_a_model_that_was_wrapped_before_or_changed_after_patching():
    model = make("Llama")
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(RuntimeError, match="forward of LlamaForCausalLM was replaced on the inst"):
        storage_ops.patch_causal_lm(model)
    del model.forward
    storage_ops.patch_causal_lm(model)
    patched = type(model)
    model.__class__ = type("Sharded", (patched,), {})
    with pytest.raises(RuntimeError, match="class of Sharded or of its output layer was changed"):
        storage_ops.unpatch_causal_lm(model)
    model.__class__ = patched
    storage_ops.unpatch_causal_lm(model)
    assert type(model) is tf.LlamaForCausalLM


@pytest.mark.in_turn
def test_importing_storage_ops_does_not_import_transformers():
    code = (
        "import sys, storage_ops; storage_ops.patch_causal_lm; print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
