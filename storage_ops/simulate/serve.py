"""Simulates a generating model of transformers: the prompt, then one token."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from storage_ops.measure.owners import owners_table
from storage_ops.quantities import Tabular, readable
from storage_ops.simulate.captured import Captured
from storage_ops.simulate.estimate import call_simulated, simulating_model
from storage_ops.simulate.rates import SimulatedDevice
from storage_ops.simulate.values.assume import Assumption

if TYPE_CHECKING:
    from storage_ops.tables import Grid

FULL, SLIDING, LATENT = (
    "KV cache of full attention", "KV cache of sliding windows", "KV cache of latents",
)  # fmt: skip
STATES = "states of linear attention and state spaces"
_STATES = "conv_states", "recurrent_states"
_NAMES = "cache", "past_key_values", "cache_params"  # from transformers 5.20 on, and before


@dataclass(frozen=True)
class ServingEstimate(Tabular):
    """The memory of generation in plain PyTorch. Prints as a table.

    Attributes:
        peak_bytes: the highest level of everything on the device.
        prefill_bytes: the highest level while the prompt is processed.
        decode_bytes: the highest level while the next token is computed.
        cache_bytes: bytes of the cache after the prompt, by kind of layer.
        by_owner: bytes at the peak by their owner, largest first.
        tokens: the number of tokens of the prompt.
    """

    peak_bytes: int
    prefill_bytes: int
    decode_bytes: int
    cache_bytes: dict[str, int]
    by_owner: dict[str, int] = field(repr=False)
    tokens: int

    def table(self, title: str) -> Grid:
        """Return a table of the memory at the peak."""
        cache = ", ".join(f"{name} {readable(n)}" for name, n in self.cache_bytes.items())
        peaks = (self.prefill_bytes, self.decode_bytes)
        prefill, decode = (readable(peak, up=True) for peak in peaks)
        return owners_table(
            title,
            self.by_owner,
            f"at the peak; without the CUDA context\nafter {self.tokens} tokens: {cache}\n"
            f"peak of the prompt {prefill}, of the next token {decode}\n"
            "in plain PyTorch, as generate() of transformers; an engine with a paged cache differs",
        )

    def __rich__(self) -> Grid:
        return self.table(f"peak {readable(self.peak_bytes, up=True)}")


def simulate_serving(
    model: nn.Module, inputs: dict[str, Tensor], device: str | torch.device | None
) -> ServingEstimate:
    """Simulate a generating model on a prompt and the next token.

    The model creates the cache, so its sizes come from the model's own code.

    Args:
        model: a model of transformers.
        inputs: keyword arguments of its forward for the prompt; the last one has the tokens.
        device: as in `simulate_step`.

    Raises:
        ValueError: the model has no cache.
    """
    takes = inspect.signature(model.forward).parameters
    name = next((name for name in _NAMES if name in takes), None)
    if name is None or "use_cache" not in takes:
        raise ValueError(
            f"`model` is a {type(model).__name__}, which has no cache. Expected a model that "
            "generates text."
        )
    simulated_device = SimulatedDevice.of(device, model, [inputs])
    captured = Captured(model, (), inputs)
    cache_bytes: Counter[str] = Counter()
    events = 0  # the number of events after the prompt

    def generate(prompt: dict[str, Any]) -> None:
        nonlocal events
        options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in takes:
            options["logits_to_keep"] = 1
        output = model(**prompt, **options)
        cache = getattr(output, name, None)
        if cache is None:
            raise ValueError(f"{type(model).__name__} returned no {name}. Expected a cache.")
        for kind, tensors in _by_kind(cache, model):
            cache_bytes[kind] += roles.note(kind, tensors)
        following = _following(prompt, output)
        del output
        events = len(ledger.events)
        model(**following, **options, **{name: cache})
        for kind, tensors in _by_kind(cache, model):
            roles.note(kind, tensors)

    simulated = simulating_model(
        model, captured, (), inputs, simulated_device, Assumption(None), "simulating generation"
    )
    with simulated as (simulation, roles, _, prompt), torch.no_grad():
        ledger = simulation.ledger
        call_simulated(generate, (prompt,), {})
        roles.add_workspaces(simulated_device, threads=1)
        levels = ledger.levels()
        totals = roles.totals()
    return ServingEstimate(
        totals["peak_bytes"], max(levels[: events + 1]), max(levels[events:]), dict(cache_bytes),
        totals["by_owner"], next(reversed(inputs.values())).shape[1],
    )  # fmt: skip


def _by_kind(cache: Any, model: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the kinds of layers of a cache, each with the tensors of one layer."""
    parts = [
        getattr(cache, name)
        for name in ("self_attention_cache", "cross_attention_cache")
        if hasattr(cache, name)
    ]
    config: Any = model.config
    latent = getattr(config.get_text_config(decoder=True), "kv_lora_rank", None)
    for part in parts or [cache]:
        for layer in getattr(part, "layers", [part]):
            values = dict(vars(layer))
            states = [values.pop(name, None) for name in _STATES]
            keys = values.get("keys")
            if isinstance(keys, Tensor):
                is_latent = latent is not None and keys.shape[-1] == latent
                is_sliding = getattr(layer, "is_sliding", False)
                kind = LATENT if is_latent else SLIDING if is_sliding else FULL
                yield kind, _numbers(values)
            else:
                states.append(values)
            yield STATES, _numbers(states)


def _numbers(values: object) -> list[Tensor]:
    """Return the floating-point tensors. A layer also has counts."""
    tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
    return [t for t in tensors if t.is_floating_point()]


def _following(prompt: dict[str, Any], output: Any) -> dict[str, Any]:
    """Return the arguments for the next token: the last input with one token for each sequence."""
    last = next(reversed(prompt))
    inputs: dict[str, Any] = {last: prompt[last][:, -1:]}
    encoded = getattr(output, "encoder_last_hidden_state", None)
    if encoded is not None:
        inputs["encoder_outputs"] = (encoded,)
    return inputs
