"""Estimated peaks of QLoRA steps against those that fms-acceleration published for an A100.

Its benchmarks (scripts/benchmarks in foundation-model-stack/fms-acceleration) train with TRL's
SFTTrainer in bfloat16 under autocast. They use transformers' gradient checkpointing, AdamW, 4-bit
bases with quantized statistics, and adapters of rank 16 and dropout 0.1 on attention projections.
Each case is rebuilt with the installed transformers and PEFT, and the loss of the version that was
measured. What their environments had besides is not simulated: flash attention by its own package,
which keeps the same tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from storage_ops.cli.quantized.adapters import with_lora
from storage_ops.cli.quantized.convert import quantize
from storage_ops.cli.quantized.options import Lora
from storage_ops.cli.quantized.schemes import Scheme
from storage_ops.memory import simulate_step

BF16 = torch.bfloat16
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# By model: the class of transformers, its config, the sequence, and the layers with adapters.
MODELS: dict[str, tuple[str, dict[str, Any], int, list[str]]] = {
    "Mistral 7B": ("Mistral", {}, 4096, ATTENTION),
    "PowerLM 3B": (
        "Granite",
        {
            "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 40,
            "num_attention_heads": 36, "num_key_value_heads": 36, "vocab_size": 49152,
            "max_position_embeddings": 4096, "tie_word_embeddings": True, "logits_scaling": 9.0,
        },
        4096,
        ATTENTION,
    ),
    "SantaCoder": (
        "GPTBigCode",
        {
            "vocab_size": 49280, "n_positions": 2048, "n_embd": 2048, "n_layer": 24, "n_head": 16,
            "n_inner": 8192, "bos_token_id": 0, "eos_token_id": 0,
        },
        2048,
        ["c_attn"],
    ),
}  # fmt: skip
# Whether PEFT's prepare_model_for_kbit_training was called, and bytes by the sequences of a batch.
Cell = tuple[str, bool, dict[int, int]]
CELLS: list[Cell] = [
    ("Mistral 7B", True, {4: 20669338112, 8: 37002646016}),
    ("SantaCoder", False, {4: 9147162112, 8: 17486716416}),
    ("PowerLM 3B", True, {4: 18174161920, 8: 34177070080}),
    ("PowerLM 3B", False, {4: 15151677952, 8: 28134687232}),
]


class Step(nn.Module):
    """Forward and loss under autocast, as the trainer runs them."""

    def __init__(self, name: str, is_prepared: bool) -> None:
        super().__init__()
        kind, config, _, adapted = MODELS[name]
        transformers: Any = importlib.import_module("transformers")
        made = getattr(transformers, f"{kind}Config")(use_cache=False, **config)
        with torch.device("meta"):
            model = getattr(transformers, f"{kind}ForCausalLM")(made).to(BF16)
        quantize(model, Scheme("nf4-double"))
        model.requires_grad_(False)
        if is_prepared:
            # TRL takes embeddings and the output layer back to 16 bits.
            for module in model.modules():
                if "Norm" in type(module).__name__:
                    module.float()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        peft: Any = importlib.import_module("peft")
        self.model: Any = with_lora(model, peft, Lora(16, adapted, 0.1))
        # Autocast casts tensors of the CPU. Memory that nothing writes takes none.
        self.model.to_empty(device="cpu").train()
        model.tie_weights()
        self.kind = kind
        self.kept: list[Tensor] | None = None  # while a forward runs
        self.read: Tensor | None = None
        model.lm_head.register_forward_hook(self._keep_input)
        if kind == "GPTBigCode":
            for path, module in self.model.named_modules():
                if path.endswith("attn.c_attn"):
                    module.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        """Keep the keys and values of a layer, as that version does under checkpoints."""
        if self.kept is not None:  # not when a checkpoint runs again
            self.kept.append(output.detach())

    def _keep_input(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep what the output layer reads, since the loss is a part of the model's forward."""
        self.read = inputs[0]

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of shifted logits."""
        with torch.autocast("cpu", BF16):
            self.kept = []
            output = self.model(input_ids=ids).logits
            # GPTBigCode's loss reads 16-bit logits. Granite's freed them, in transformers 4.45.
            logits = output if self.kind == "GPTBigCode" else output.float()
            if self.kind == "Granite":
                output = logits
            shifted = logits[..., :-1, :].contiguous()
            loss = F.cross_entropy(shifted.flatten(0, 1), ids[..., 1:].contiguous().flatten())
            del logits, shifted
            self.read = None
        output.float()  # accelerate returns outputs in float32
        self.kept = None
        return loss


def peaks(cell: Cell) -> Iterator[tuple[str, int, int]]:
    """Yield what was measured, and the published and the estimated peak in bytes."""
    name, is_prepared, published = cell
    for batch, peak in published.items():
        model, ids = Step(name, is_prepared), torch.empty(batch, MODELS[name][2], dtype=torch.int64)
        adamw = torch.optim.AdamW
        step = simulate_step(model, ids, loss=lambda x: x, optimizer=adamw, device="a100")
        how = ", norms in float32" if is_prepared else ""
        yield f"{name}, QLoRA{how}, batch {batch}", peak, step.peak_bytes
