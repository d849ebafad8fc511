"""Adapters that PEFT selects by hooks for one forward, in checkpointed layers."""

import pytest
import torch

import storage_ops as so

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

MODES = {
    "full": {},
    "selective": {"policy": "matmuls"},
    "output_discard": {"mode": "output_discard"},
    "reentrant": {"use_reentrant": True},
}
IDS = torch.tensor([[1, 2, 3, 5, 6, 7], [1, 5, 6, 4, 3, 2], [9, 8, 7, 6, 5, 4]])


def make(**options):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=20,
        )
    )
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        **options,
    )
    return peft.get_peft_model(model, config, adapter_name="a")


def gradients(model, **inputs):
    model.enable_input_require_grads()  # a reentrant checkpoint needs an input with a gradient
    model(input_ids=IDS, labels=IDS, use_cache=False, **inputs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "kind",
    [
        "an adapter for each row",
        pytest.param(
            "activated adapters",
            marks=pytest.mark.skipif(peft.__version__ < "0.18", reason="peft has aLoRA since 0.18"),
        ),
    ],
)
def test_gradients_are_those_without_checkpoints(kind, mode):
    models = []
    for _ in range(2):
        if kind == "activated adapters":
            model, inputs = make(alora_invocation_tokens=[5, 6]).train(), {}
        else:
            model, inputs = make(), {"adapter_names": ["a", "b", "__base__"]}
            model.add_adapter("b", model.peft_config["a"])
            model.base_model.set_adapter(["a", "b"])
            model.eval()  # PEFT refuses adapter names in training mode
        models.append(model)
    models[1].load_state_dict(models[0].state_dict())
    config = so.ActivationCheckpointConfig(layer_classes=["LlamaDecoderLayer"], **MODES[mode])
    so.apply_activation_checkpoint(models[1], config)
    right, got = (gradients(model, **inputs) for model in models)
    assert got.keys() == right.keys() and all("lora" in name for name in got) and got
    assert all(torch.equal(got[name], right[name]) for name in right)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_parameters_are_copied_only_if_an_adapter_is_merged(copied, options):
    """The forward of a merged layer with disabled adapters writes the weights through `.data`."""
    model = make(**options)
    model.enable_input_require_grads()
    so.apply_activation_checkpoint(model, {"layer_classes": ["LlamaDecoderLayer"]})
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert not any(isinstance(t, torch.nn.Parameter) for t in copied)
    model.merge_adapter()
    model(input_ids=IDS, labels=IDS, use_cache=False)
    assert any(isinstance(t, torch.nn.Parameter) for t in copied)


@pytest.mark.parametrize("mode", MODES)
def test_a_merged_adapter_that_is_disabled_is_unmerged_once(mode):
    models = [make().train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    so.apply_activation_checkpoint(
        models[1], {"layer_classes": ["LlamaDecoderLayer"], **MODES[mode]}
    )
    results = []
    for model in models:
        embedding = model.get_input_embeddings().weight.requires_grad_()
        model.merge_adapter()
        with model.disable_adapter():
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
            loss.backward()
        results.append((embedding.grad, *model.state_dict().values()))
    assert all(map(torch.equal, *results))
