"""Every type of the installed transformers, with and without patch_causal_lm.

`python -m tests.integrations.sweep --write` runs all of them and writes a page of docs. Five types
need timm (with torchvision) or scipy.

A row has the verdict on a type:

    equal: the patched model has the loss and all gradients of the plain one
    refused: patch_causal_lm raised an error that names the type
    refused late: the first forward of the patched model raised this error
    different: the loss or a gradient is wrong
    not built: no small model with a finite loss was found, with the reason
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import storage_ops

from .small_configs import SETTINGS, V, small_config

FAMILIES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image and text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
PAGE = Path(__file__).parents[2] / "docs" / "transformers-types.md"
MOST = 100_000_000  # parameters of a small model
_SECONDS = 120


def families() -> dict[str, dict[str, str]]:
    """Return the names of the models of each family, by type."""
    names = importlib.import_module("transformers.models.auto.modeling_auto")
    return {family: dict(getattr(names, mapping)) for family, mapping in FAMILIES.items()}


def build(name: str, setting: dict[str, object]) -> torch.nn.Module:
    """Return a small model in training mode, with larger weights than a new one."""
    model_class = getattr(importlib.import_module("transformers"), name)
    config = small_config(model_class, setting)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > MOST:
        raise ValueError(f"the small config has {size:,} parameters")
    torch.manual_seed(1)
    model = model_class(config).train().float()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


def inputs(model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return batches to try. The first one has only text."""
    ids = torch.randint(60, V, (2, 12))
    labels = ids.clone()
    labels[0, :3] = -100
    text = {"input_ids": ids, "labels": labels}
    vision = getattr(model.config, "vision_config", None)
    size = getattr(vision, "image_size", 28)
    image = torch.rand(2, 3, *(size if isinstance(size, (tuple, list)) else (size, size)))
    masked = {**text, "attention_mask": torch.ones_like(ids)}
    pictured = {**masked, "pixel_values": image}
    marked = {**pictured, "input_ids": ids.clone()}
    marked["input_ids"][:, :2] = 3  # an image of two tokens
    return [
        text, {**text, "use_cache": False}, masked, pictured,
        {"pixel_values": image, "labels": labels}, {**text, "decoder_input_ids": ids},
        {"pixel_values": image, "labels": labels, "decoder_input_ids": ids},
        {**text, "encoder_inputs_embeds": torch.rand(2, 48, 32)},
        {"flattened_patches": torch.rand(2, 4, 770), "labels": labels},
        {"input_ids": ids.repeat(4, 1), "labels": ids.unsqueeze(-1).repeat(1, 1, 4)},
        {**text, "mm_token_type_ids": torch.zeros_like(ids)},
        {**masked, "bbox": torch.randint(100, (2, 12, 4)).sort(-1).values},
        {**masked, "bbox": torch.rand(2, 12, 4).sort(-1).values},
        marked, {**marked, "qformer_input_ids": ids},
        {**marked, "qformer_input_ids": ids, "pixel_values": image[:, None]},
        {**text, "image_embeds": torch.rand(2, 2, 32),
         "image_embeds_position_mask": marked["input_ids"] == 3},
        {**masked, "pixel_values": image[:, None],
         "image_attention_mask": torch.ones(2, 12, 1, dtype=torch.long)},
    ]  # fmt: skip


def loss_and_gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]):
    """Return loss and gradients, with a fixed seed for dropout."""
    model.zero_grad()
    torch.manual_seed(2)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _close(got, right) -> bool:
    if got[1].keys() != right[1].keys():
        return False
    pairs = [(got[0], right[0]), *((got[1][n], right[1][n]) for n in right[1])]
    scale = max(float(r.abs().max()) for _, r in pairs[1:] if r.numel())
    return all(
        torch.allclose(f.float(), r.float(), rtol=2e-3, atol=1e-5 * max(scale, 1)) for f, r in pairs
    )


def _runnable(model: torch.nn.Module):
    """Return a batch for which two runs agree, with its loss and gradients."""
    reasons = []
    for batch in inputs(model):
        try:
            right = loss_and_gradients(model, batch)
        except Exception as error:
            reasons.append(error)
            continue
        if not right[0].isfinite():
            reasons.append(ValueError("its loss is not finite"))
        elif not _close(loss_and_gradients(model, batch), right):
            reasons.append(ValueError("two runs of it differ"))
        else:
            return batch, right
    raise reasons[0]


def _words(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    text = f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__
    return text.replace("|", "/").replace("`", "'")[:110]


def _built(name: str):
    """Return a model, and a batch with its loss and gradients. If none runs, return the error."""
    errors, model = [], None
    for setting in SETTINGS:
        try:
            model = build(name, setting)
            return model, _runnable(model)
        except Exception as error:
            errors.append(error)
    if model is None:
        raise errors[0]
    return model, errors[0]


def judge(name: str) -> tuple[str, str]:
    """Return the verdict on a type, and the reason if it is not "equal"."""
    try:
        model, ran = _built(name)
    except Exception as error:
        return _refused_as_a_class(name) or ("not built", _words(error))
    try:
        storage_ops.patch_causal_lm(model, logits="never")
    except (NotImplementedError, TypeError, RuntimeError) as error:
        named = "patch_causal_lm" in str(error) and type(model).__name__ in str(error)
        return ("refused" if named else "different"), _reason(error)
    if isinstance(ran, Exception):
        return "not built", _words(ran)
    batch, right = ran
    try:
        got = loss_and_gradients(model, batch)
    except NotImplementedError as error:
        return "refused late", _reason(error)
    except Exception as error:
        return "different", _words(error)
    return ("equal", "") if _close(got, right) else ("different", "loss or gradients")


def _refused_as_a_class(name: str) -> tuple[str, str] | None:
    """Return the verdict "refused" if the forward of a type takes no labels."""
    model_class = getattr(importlib.import_module("transformers"), name)
    model = torch.nn.Module.__new__(model_class)
    torch.nn.Module.__init__(model)
    try:
        storage_ops.patch_causal_lm(model)
    except Exception as error:
        return ("refused", _reason(error)) if "takes no labels" in str(error) else None


def _reason(error: BaseException) -> str:
    text = str(error).removeprefix("patch_causal_lm: ").split(". ")[0].split(", which")[0]
    return text.replace("|", "/")[:160]


class _Late(Exception):
    """A type took too long."""


def sweep(wanted: list[str] | None = None, log=None) -> list[tuple[str, str, str, str]]:
    """Return (family, type, verdict, reason) for every type, or for the types in `wanted`."""

    def late(*_):
        raise _Late

    signal.signal(signal.SIGALRM, late)
    rows, judged = [], {}
    for family, types in families().items():
        for kind, names in types.items():
            if wanted and kind not in wanted:
                continue
            name = names if isinstance(names, str) else names[0]
            if name not in judged:
                signal.alarm(_SECONDS)
                try:
                    with (
                        warnings.catch_warnings(),
                        contextlib.redirect_stderr(io.StringIO()),
                        contextlib.redirect_stdout(io.StringIO()),
                    ):
                        warnings.simplefilter("ignore")
                        judged[name] = judge(name)
                except _Late:
                    judged[name] = "not built", f"longer than {_SECONDS} s"
                finally:
                    signal.alarm(0)
            rows.append((family, kind, *judged[name]))
            if log is not None:
                print(*rows[-1], sep=" | ", file=log, flush=True)
    return rows


HEAD = """# Types of transformers under `patch_causal_lm`

Which models can `patch_causal_lm` patch? A small model of every type was trained in float32 on a
CPU, with random weights and with labels, patched and not patched.

* *Equal*: the loss and all gradients differ by at most 0.2 %.
* *Refused*: `patch_causal_lm` raises an error that names the type.
* *Refused late*: the first forward with labels raises this error.
* *Different*: the loss or a gradient differs by more than 0.2 %.
* *Not built*: the default config gave no small model with a finite loss, so nothing was compared.

A type may be in two families. Most image-text types get only text. Five types need timm or scipy.
`python -m tests.integrations.sweep --write` writes this page, here with
transformers {} and torch {}.
"""


def page(rows: list[tuple[str, str, str, str]]) -> str:
    """Return the text of the page."""
    import transformers

    verdicts = ("equal", "refused", "refused late", "different", "not built")
    text = [
        HEAD.format(transformers.__version__, torch.__version__.split("+")[0]),
        "| family | types | " + " | ".join(verdicts) + " |",
        "|---|" + "---|" * (len(verdicts) + 1),
    ]
    for family in FAMILIES:
        own = [row[2] for row in rows if row[0] == family]
        counts = " | ".join(str(own.count(verdict)) for verdict in verdicts)
        text.append(f"| {family} | {len(own)} | {counts} |")
    for verdict in verdicts:
        matching = [row for row in rows if row[2] == verdict]
        if not matching:
            continue
        text += ["", f"## {verdict.capitalize()}", ""]
        if verdict == "equal":
            text += ["| family | types |", "|---|---|"]
            for family in FAMILIES:
                kinds = [row[1] for row in matching if row[0] == family]
                text += [f"| {family} | {', '.join(kinds)} |"] if kinds else []
        else:
            text += ["| family | type | reason |", "|---|---|---|"]
            text += [f"| {row[0]} | {row[1]} | {row[3]} |" for row in matching]
    return "\n".join(text) + "\n"


def main() -> None:
    """Run the sweep for all types, or for those named on the command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    args = parser.parse_args()
    rows = sweep(args.types, sys.stdout)
    if args.write:
        PAGE.write_text(page(rows))
    sys.exit(any(row[2] == "different" for row in rows))


if __name__ == "__main__":
    main()
