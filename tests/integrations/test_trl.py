"""Unchanged trainers of TRL give the same parameters and metrics with patched models."""

import copy
import importlib

import pytest
import torch

import storage_ops
from storage_ops.integrations.deferred_logits import DeferredLogits

from ..refused import refused
from .models import SIZES, V, make, tf

trl = pytest.importorskip(
    "trl",
    minversion="1.16",
    reason="no trl >= 1.16: no trainer of TRL was run with a patched model",
)
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def tokenizer():
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, V))]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<s>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def text(length):
    return " ".join(f"w{i}" for i in torch.randint(3, V, (length,)).tolist())


def lengths(completions, **kwargs):
    """Return rewards: the lengths of the completions."""
    return [len(set(text)) / 10 for text in completions]


EXPERIMENTAL = {
    "ORPO": "orpo", "CPO": "cpo", "TPO": "tpo", "OnlineDPO": "online_dpo", "GKD": "gkd"
}  # fmt: skip


def a_trainer(kind, model, folder, tokenizer, data, options):
    """Return a trainer of TRL for three steps of SGD, whose steps are proportional to gradients."""
    common = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "max_steps": 3, "seed": 3,
        "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no",
        "disable_tqdm": True, "learning_rate": 0.1, "optim": "sgd", "bf16": False,
    }  # fmt: skip
    config = options.pop("peft_config", None)
    more = {}
    if kind in ("DPO", "KTO"):
        more["ref_model"] = copy.deepcopy(model) if config is None else None
    if kind in ("GRPO", "RLOO", "OnlineDPO"):
        more["reward_funcs"] = lengths
    if kind == "GKD":
        more["teacher_model"] = copy.deepcopy(model)
    module = trl
    if kind in EXPERIMENTAL:
        module = importlib.import_module(f"trl.experimental.{EXPERIMENTAL[kind]}")
    arguments = getattr(module, f"{kind}Config")(**{**common, **options})
    return getattr(module, f"{kind}Trainer")(
        model, args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=config,
        **more,
    )  # fmt: skip


def check_deferred(model, args, outputs):
    wanted = model.training and torch.is_grad_enabled()
    assert isinstance(outputs.logits, DeferredLogits if wanted else torch.Tensor)


def rows_for(kind):
    rows = []
    for k in range(12):
        row = {"prompt": text(4)}
        if kind in ("SFT", "KTO"):
            row["completion"] = text(3 + k % 4)
        if kind == "KTO":
            row["label"] = k % 3 != 0
        if kind in ("DPO", "ORPO", "CPO", "TPO"):
            row |= {"chosen": text(3 + k % 4), "rejected": text(5)}
        if kind == "TPO":
            row["reference"] = text(6)
        if kind == "GKD":
            words = {"user": text(4), "assistant": text(3)}
            row = {"messages": [{"role": role, "content": words[role]} for role in words]}
        rows.append(row)
    return datasets.Dataset.from_list(rows)


CASES = {
    "SFT": ("SFT", "Llama", {}),
    "SFT, DFT": ("SFT", "Cohere, scale", {"loss_type": "dft"}),
    "SFT, auxiliary loss": ("SFT", "Mixtral, auxiliary loss", {}),
    "SFT, LoRA": ("SFT", "Llama", {"peft_config": True}),
    "SFT, label smoothing": ("SFT", "Gemma 2, soft-cap", {"label_smoothing_factor": 0.1}),
    "DPO, WPO": ("DPO", "Llama", {"use_weighting": True}),
    "DPO, soft-cap": ("DPO", "Gemma 2, soft-cap", {"use_weighting": True, "loss_type": ["ipo"]}),
    "DPO, LoRA": ("DPO", "Phi, bias", {"peft_config": True}),
    "DPO, mixed precision": ("DPO", "Llama", {"bf16": True}),
    "KTO": ("KTO", "Llama", {}),
    "GRPO": ("GRPO", "Llama", {"temperature": 0.8, "beta": 0.1, "num_generations": 2,
                               "max_completion_length": 5, "top_entropy_quantile": 0.6}),
    "RLOO": ("RLOO", "Llama", {"num_generations": 2, "max_completion_length": 5}),
    "ORPO": ("ORPO", "Llama", {}),
    "ORPO, mixed precision": ("ORPO", "Gemma 2, soft-cap", {"bf16": True}),
    "CPO": ("CPO", "Cohere, scale", {}),
    "TPO": ("TPO", "Gemma 2, soft-cap", {}),
    "OnlineDPO": ("OnlineDPO", "Llama", {"max_new_tokens": 5, "missing_eos_penalty": None}),
}  # fmt: skip

PATCHED_BEFORE = {
    "SFT", "SFT, LoRA", "DPO, LoRA", "DPO, mixed precision", "KTO", "GRPO", "RLOO", "ORPO", "TPO",
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.mark.in_turn
@pytest.mark.parametrize("case", CASES)
def test_training(case, tokenizer, tmp_path, monkeypatch):
    kind, name, options = CASES[case]
    if "peft_config" in options:
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4)
        options = {**options, "peft_config": config}
    make(name).save_pretrained(tmp_path / "model")  # GRPO loads its reference from this folder
    data, results = rows_for(kind), []
    before = case in PATCHED_BEFORE
    for patched in (False, True):
        model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        if patched and before:
            storage_ops.patch_causal_lm(model, logits="deferred")
        trainer = a_trainer(kind, model, tmp_path, tokenizer, data, dict(options))
        if patched:
            if not before:
                storage_ops.patch_causal_lm(trainer.model, logits="deferred")
            if getattr(trainer, "ref_model", None) is not None:
                storage_ops.patch_causal_lm(trainer.ref_model, logits="deferred")
            monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", None)  # is not called
            if kind in EXPERIMENTAL:
                trainer.model.register_forward_hook(check_deferred)
        trainer.train()
        parameters = {n: p.detach() for n, p in trainer.model.named_parameters()}
        metrics = [
            {k: v for k, v in line.items() if not k.endswith(("_per_second", "_runtime", "_time"))}
            for line in trainer.state.log_history if "loss" in line
        ]  # fmt: skip
        results.append((parameters, metrics))
    (right, lines), (ours, own) = results
    exact = not options.get("bf16")
    torch.testing.assert_close(ours, right, rtol=1e-3, atol=2e-4 if exact else 1e-2)
    assert len(lines) == 3
    assert kind in EXPERIMENTAL or any("entropy" in line for line in lines)
    for line, mine in zip(lines, own, strict=True):
        assert line.keys() == mine.keys()
        line.pop("rewards/accuracies", None)  # all rewards in the first line are 0, up to rounding
        line.pop("frac_reward_zero_std", None)  # for equal rewards it depends on rounding
        for key, value in line.items():
            assert mine[key] == pytest.approx(
                value, rel=2e-3 if exact else 0.1, abs=1e-4 if exact else 0.15, nan_ok=True
            ), key


def test_a_divergence_of_two_models_is_not_supported(tokenizer, tmp_path):
    model = make("Llama")
    storage_ops.patch_causal_lm(model, logits="deferred")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    trainer = a_trainer("GKD", model, tmp_path, tokenizer, rows_for("GKD"), {"lmbda": 0.0})
    with pytest.raises(
        NotImplementedError, match=r"as GKDTrainer of TRL .*storage_ops.linear_kl_div"
    ):
        trainer.train()


def a_fused_model(**options):
    model = make("Llama")
    trl.trainer.add_fused_lm_head(model, **options)
    return model


def test_results_per_token_and_gradients(batch):
    """Test the fused head alone in float64, also with shift_labels and after unpatching."""
    names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    model = a_fused_model(temperature=0.7, outputs=names)
    bound = vars(model)["forward"]
    batch = {**batch, "fused_lm_head": True}
    shifted = torch.cat([batch["labels"][:, 1:], torch.full((3, 1), -100)], 1)
    right, loss = [], 0
    for patched in (False, True):
        if patched:
            storage_ops.patch_causal_lm(model)
        results = model(**batch), model(**{**batch, "labels": None}, shift_labels=shifted)
        if not patched:
            right = results
            continue
        for ours, theirs in zip(results, right, strict=True):
            assert type(ours) is type(theirs) and ours.keys() == theirs.keys()
            torch.testing.assert_close(dict(ours), dict(theirs), rtol=1e-4, atol=1e-5)
    gradients = []
    for outputs in (right[0], results[0]):
        model.zero_grad()
        weights = torch.arange(24.0).view(3, 8)
        loss = (outputs.log_probs * weights).sum() + (outputs.entropy * weights).sum()
        loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    plain = model(batch["input_ids"], labels=batch["labels"])
    assert plain.logits is None and plain.loss.requires_grad  # plain calls are patched too
    storage_ops.unpatch_causal_lm(model)
    assert vars(model)["forward"] == bound
    torch.testing.assert_close(model(**batch).log_probs, right[0].log_probs)


def test_a_model_patched_before_trl_adds_its_fused_head(batch, monkeypatch):
    model = make("Llama")
    theirs = copy.deepcopy(model)
    trl.trainer.add_fused_lm_head(theirs)
    expected = theirs(**batch, fused_lm_head=True).log_probs
    storage_ops.patch_causal_lm(model)
    trl.trainer.add_fused_lm_head(model)
    ours = vars(model)["forward"]
    storage_ops.patch_causal_lm(model)
    assert vars(model)["forward"] == ours
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", None)  # is not called
    torch.testing.assert_close(model(**batch, fused_lm_head=True).log_probs, expected)
    with pytest.raises(ValueError, match="without labels"):
        model(batch["input_ids"], fused_lm_head=True)


@pytest.mark.parametrize(
    "head_options, options, kind, message",
    [
        refused(NotImplementedError, "cast_lm_head_to_fp32=True", {"cast_lm_head_to_fp32": True}),
        refused(NotImplementedError, "ranks", {"outputs": ("log_probs", "ranks")}),
        refused(ValueError, "label_smoothing=0", {}, label_smoothing=0.1),
        refused(ValueError, "token_weights=None", {}, token_weights="w"),
    ],
)
def test_unsupported_options_are_refused(head_options, options, kind, message):
    model = a_fused_model(**head_options)
    with pytest.raises(kind, match=message):
        storage_ops.patch_causal_lm(model, **options)
    assert type(model) is tf.LlamaForCausalLM and type(model.lm_head) is torch.nn.Linear


def test_no_logits_are_in_memory():
    vocabulary = 20_000
    config = tf.LlamaConfig(**{**SIZES, "vocab_size": vocabulary, "hidden_size": 16})
    model = tf.LlamaForCausalLM(config)
    trl.trainer.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    storage_ops.patch_causal_lm(model, memory_budget="4 MiB")
    ids = torch.randint(3, vocabulary, (8, 64))

    def step():
        outputs = model(input_ids=ids, labels=ids, fused_lm_head=True)
        (outputs.log_probs.sum() + outputs.entropy.sum()).backward()

    step()
    model.zero_grad()
    with storage_ops.memory.measure() as m:
        step()
    gradients = sum(p.grad.nbytes for p in model.parameters())
    assert m.peak_bytes - gradients < 12 * (1 << 20) < ids.numel() * vocabulary * 4 / 3
