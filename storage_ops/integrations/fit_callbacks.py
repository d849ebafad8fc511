"""Callbacks of trainers that apply a plan of `fit` when training starts, and undo it at the end."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

from torch import nn
from torch.optim import Optimizer

from storage_ops.fitting.plan import FitPlan, load_fit
from storage_ops.integrations.first_batch import FirstBatch, Training
from storage_ops.optional import required


class _Applied:
    """A plan, or the file of a plan, and whether it is applied."""

    def __init__(self, plan: FitPlan | str | os.PathLike[str]) -> None:
        if not isinstance(plan, (FitPlan, str, os.PathLike)):
            raise TypeError(
                f"`plan` is a {type(plan).__name__}. Expected what storage_ops.fit returned, or "
                "the path of a file that it saved."
            )
        if not isinstance(plan, FitPlan) and not os.path.isfile(plan):
            raise FileNotFoundError(
                f"`plan` is {os.fspath(plan)!r}, but there is no such file. Expected the path of a "
                "file that plan.save() wrote."
            )
        self._source = plan
        self._plan: FitPlan | None = None
        self._first_batch: FirstBatch | None = None

    def start(self, model: nn.Module, training: Training) -> None:
        """Apply the plan to a model. A hook compares the first batch with the plan's batch.

        Raises:
            ValueError, RuntimeError: the plan is for another model.
        """
        self.end()  # an earlier training may have ended with an error
        source = self._source
        plan = source if isinstance(source, FitPlan) else load_fit(source, model)
        if not plan.is_of(model):
            raise ValueError(
                f"`plan` was made for another object than the {type(model).__name__} that is "
                "trained. Expected a plan of that object, or the path of a file that it saved."
            )
        plan.apply()
        self._plan, self._first_batch = plan, FirstBatch(plan, model, training, self.end)

    def end(self) -> None:
        """Undo the plan in the layers of the model."""
        plan, self._plan = self._plan, None
        if self._first_batch is not None:
            self._first_batch.disarm()
            self._first_batch = None
        if plan is not None and plan.is_applied:
            plan.undo()


_AUTOCAST_OF_ACCELERATE = {"fp16": "float16", "bf16": "bfloat16"}
_AUTOCAST_OF_LIGHTNING = {"16-mixed": "float16", "bf16-mixed": "bfloat16"}


def _check_arguments(args: object) -> None:
    """Raise an error for TrainingArguments that let transformers checkpoint layers.

    Raises:
        ValueError: such an argument is on. The error has its name in this version of transformers.
    """
    # The names since 5.2x, and before.
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if getattr(args, name, None):
            raise ValueError(
                f"`{name}` is True in the TrainingArguments, but the plan of fit chooses what to "
                f"recompute. Pass TrainingArguments({name}=False)."
            )


def _training_of(args: object, optimizer: Optimizer | None) -> Training:
    """Return the facts about a step in the TrainingArguments of transformers."""
    size = getattr(args, "per_device_train_batch_size", None)
    # Without an argument, accelerate uses the precision of `accelerate launch`. transformers 4 sets
    # the same variable, which stays for the next Trainer of a program.
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    precision = next((name for name in ("bf16", "fp16") if getattr(args, name, False)), launched)
    return Training(
        optimizer=optimizer,
        autocast=_AUTOCAST_OF_ACCELERATE.get(precision, ""),
        accumulate=getattr(args, "gradient_accumulation_steps", 1) > 1,
        remedy=f"lower per_device_train_batch_size, which is {size}",
    )


def trainer_callback(plan: FitPlan | str | os.PathLike[str]) -> Any:
    """Return a `transformers.TrainerCallback` that applies a plan while a Trainer trains.

    The first batch is compared with the one that the plan was made for: shapes, the dtype of
    autocast and gradient accumulation. If a step takes more memory than the plan's budget, the
    training ends with a ValueError before the forward. Otherwise, a warning names the difference.
    Models that `torch.compile` compiles are not compared.

    transformers does not tell callbacks that a training ended with an error or an interrupt. The
    plan is then applied until the next training with this callback, or until `plan.undo()`.

    Args:
        plan: what `storage_ops.fit` returned for the Trainer's model, or the path of a file that it
            saved for one like it.

    Raises:
        TypeError: `plan` is neither.
        FileNotFoundError: there is no such file.
        ImportError: transformers is not installed.
        ValueError: raised when training starts. The plan is for another model, a step exceeds its
            budget, or the TrainingArguments turn on checkpoints of transformers.

    Example:
        >>> from storage_ops.integrations import trainer_callback
        >>> callbacks = [trainer_callback("fit.json")]  # doctest: +SKIP
    """
    applied = _Applied(plan)
    transformers: Any = required("transformers", "trainer_callback")

    class FitCallback(transformers.TrainerCallback):
        """Applies a plan of storage_ops.fit."""

        def on_train_begin(
            self, args: object, state: object, control: object, **kwargs: Any
        ) -> None:
            """Apply the plan."""
            model = kwargs["model"]
            _check_arguments(args)
            model.train()  # as for the plan; the Trainer does it a little later
            applied.start(model, _training_of(args, kwargs.get("optimizer")))

        def on_train_end(
            self, args: object, state: object, control: object, **kwargs: object
        ) -> None:
            """Undo the plan."""
            applied.end()

    return FitCallback()


def _lightning() -> str:
    """Return the name of the package whose Trainer the program uses.

    `lightning` installs `pytorch_lightning` too, whose Trainer may refuse callbacks of the other.
    """
    new, old = "lightning.pytorch", "pytorch_lightning"
    imported = [name for name in (new, old) if sys.modules.get(name) is not None]
    if imported:
        return imported[0]
    has_new = importlib.util.find_spec("lightning") is not None
    has_old = importlib.util.find_spec(old) is not None
    return old if has_old and not has_new else new


def _submodule(module: nn.Module, attribute: str) -> nn.Module:
    """Return the module that `attribute` of `lightning_callback` names.

    Raises:
        ValueError: there is none.
    """
    try:
        return module.get_submodule(attribute)
    except AttributeError:
        names = ", ".join(name for name, _ in module.named_children())
        raise ValueError(
            f"`attribute` is {attribute!r}, but {type(module).__name__} has no such module. "
            f"Expected the name of the model that the plan was made for, such as {names}."
        ) from None


def lightning_callback(plan: FitPlan | str | os.PathLike[str], attribute: str = "") -> Any:
    """Return a Lightning `Callback` that applies a plan while a Trainer fits.

    The first batch is compared with the plan's batch, as in `trainer_callback`.

    Args:
        plan: the result of `storage_ops.fit`, or the path of a file that it was saved in.
        attribute: the name of the fitted model in the LightningModule, such as "model". ""
            if the LightningModule itself was fitted.

    Raises:
        TypeError: `plan` is neither, or `attribute` is no name.
        FileNotFoundError: there is no such file.
        ImportError: neither `lightning` nor `pytorch_lightning` is installed.

    Example:
        >>> from storage_ops.integrations import lightning_callback
        >>> callback = lightning_callback("fit.json", "model")  # doctest: +SKIP
    """
    applied = _Applied(plan)
    if not isinstance(attribute, str):
        raise TypeError(
            f"lightning_callback: `attribute` is a {type(attribute).__name__}. Expected the name "
            "of the fitted model in the LightningModule, such as 'model'."
        )
    library: Any = required(_lightning(), "lightning_callback")

    class FitCallback(library.Callback):
        """Applies a plan of storage_ops.fit."""

        def on_fit_start(self, trainer: object, pl_module: nn.Module) -> None:
            """Apply the plan."""
            optimizers = getattr(trainer, "optimizers", None) or [None]
            precision = str(getattr(trainer, "precision", ""))
            training = Training(
                optimizer=optimizers[0] if len(optimizers) == 1 else None,
                autocast=_AUTOCAST_OF_LIGHTNING.get(precision, ""),
                accumulate=getattr(trainer, "accumulate_grad_batches", 1) > 1,
            )
            applied.start(_submodule(pl_module, attribute), training)

        def on_fit_end(self, trainer: object, pl_module: nn.Module) -> None:
            """Undo the plan."""
            applied.end()

        def on_exception(
            self, trainer: object, pl_module: nn.Module, exception: BaseException
        ) -> None:
            """Undo the plan."""
            applied.end()

    return FitCallback()
