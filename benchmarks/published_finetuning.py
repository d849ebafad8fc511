"""Estimated peaks of fine-tuning steps against those that fms-acceleration published for an A100.

Its benchmarks (scripts/benchmarks in foundation-model-stack/fms-acceleration) train with TRL's
SFTTrainer, transformers' gradient checkpointing and AdamW. Adapters have rank 16 and dropout 0.1,
on attention projections. Bases are in bfloat16, or in 4 bits under autocast.

Each case is rebuilt with the installed transformers and PEFT, and the loss of the measured version.
Flash attention by its package, which saves the same tensors, is not simulated. On two GPUs, FSDP2
stands in for the FSDP1 of the measured runs, which also gathers one layer at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from benchmarks._one_rank import one_of
from storage_ops.cli.quantized.adapters import with_lora
from storage_ops.cli.quantized.convert import quantize
from storage_ops.cli.quantized.options import Lora
from storage_ops.cli.quantized.schemes import Scheme
from storage_ops.memory import simulate_step

BF16 = torch.bfloat16
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# For each model: class of transformers, config, sequence, and layers with adapters.
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


class Cell(NamedTuple):
    """A group of published cases.

    Attributes:
        model: a key of `MODELS`.
        published: bytes by the sequences of a batch.
        base: quantization of the base. With None, it is in 16 bits without autocast.
        is_prepared: whether PEFT's prepare_model_for_kbit_training was called.
        adapts: whether only adapters are trained, instead of all parameters.
        ranks: GPUs, over which FSDP shards the model.
    """

    model: str
    published: dict[int, int]
    base: str | None = "nf4-double"
    is_prepared: bool = False
    adapts: bool = True
    ranks: int = 1


CELLS = [
    Cell("Mistral 7B", {4: 20669338112, 8: 37002646016}, is_prepared=True),
    Cell("SantaCoder", {4: 9147162112, 8: 17486716416}),
    Cell("PowerLM 3B", {4: 18174161920, 8: 34177070080}, is_prepared=True),
    Cell("PowerLM 3B", {4: 15151677952, 8: 28134687232}),
    Cell("Mistral 7B", {4: 26704571904, 8: 38742912512}, None),
    Cell("PowerLM 3B", {4: 20169870848, 8: 33152880128}, None),
    Cell("Mistral 7B", {4: 16404148736, 8: 28442489344}, "gptq"),
    Cell("Mistral 7B", {4: 72434837504, 8: 72435230720}, None, adapts=False),
    Cell("PowerLM 3B", {4: 35134836736, 8: 47059390976}, None, adapts=False),
    Cell("SantaCoder", {2: 5716304896, 4: 7819433984}, None, adapts=False, ranks=2),
    Cell("Mistral 7B", {2: 36225939968, 4: 36226136576}, None, adapts=False, ranks=2),
    Cell("PowerLM 3B", {2: 17626672128, 4: 23781051904}, None, adapts=False, ranks=2),
    Cell("PowerLM 3B", {2: 10321519104, 4: 16819665408}, None, ranks=2),
]
# The cause is unknown. With PowerLM, and with Mistral on one GPU, the same steps agree.
TOO_LOW = [Cell("Mistral 7B", {2: 15144870400, 4: 21959827968}, None, ranks=2)]


class Step(nn.Module):
    """Forward and loss, as the trainer runs them."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        kind, config, _, adapted = MODELS[cell.model]
        # GPTQ's products are in float16, whose sizes are those of this CPU autocast.
        self.autocasts = cell.base is not None
        transformers: Any = importlib.import_module("transformers")
        model_config = getattr(transformers, f"{kind}Config")(use_cache=False, **config)
        with torch.device("meta"):
            model = getattr(transformers, f"{kind}ForCausalLM")(model_config).to(BF16)
        if cell.base is not None:
            quantize(model, Scheme(cell.base))
        model.requires_grad_(not cell.adapts)
        if cell.is_prepared:
            # TRL converts embeddings and the output layer back to 16 bits.
            for module in model.modules():
                if "Norm" in type(module).__name__:
                    module.float()
        if cell.adapts:
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        self.model: Any = model
        if cell.adapts:
            peft: Any = importlib.import_module("peft")
            self.model = with_lora(model, peft, Lora(16, adapted, 0.1))
        if cell.ranks > 1:
            mesh = init_device_mesh("cpu", (cell.ranks,))
            for layers in [m for m in self.model.modules() if type(m) is nn.ModuleList]:
                for layer in layers:
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        # Autocast casts only CPU tensors. Unwritten pages use no memory.
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
        if self.kept is not None:  # not in a recompute
            self.kept.append(output.detach())

    def _keep_input(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep the output layer's input, since the loss is a part of the model's forward."""
        self.read = inputs[0]

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of shifted logits."""
        with torch.autocast("cpu", BF16, enabled=self.autocasts):
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
        if self.autocasts:
            output.float()  # accelerate returns outputs in float32
        self.kept = None
        return loss


def peaks(cell: Cell) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each case, and its published and estimated peak in bytes."""
    for batch, peak in cell.published.items():
        ids = torch.empty(batch, MODELS[cell.model][2], dtype=torch.int64)
        adamw = torch.optim.AdamW
        with one_of(cell.ranks):
            model = Step(cell)
            step = simulate_step(model, ids, loss=lambda x: x, optimizer=adamw, device="a100")
        how = {None: "LoRA", "nf4-double": "QLoRA", "gptq": "LoRA on GPTQ"}[cell.base]
        how = how if cell.adapts else "whole step"
        how += ", norms in float32" if cell.is_prepared else ""
        how += f", FSDP over {cell.ranks}" if cell.ranks > 1 else ""
        yield f"{cell.model}, {how}, batch {batch}", peak, step.peak_bytes
