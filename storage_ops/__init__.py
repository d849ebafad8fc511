"""Free an activation's bytes, bind them back in place, and train large models in less memory."""

import warnings as _warnings
from typing import TYPE_CHECKING, Any

from storage_ops import _library

__version__ = _library.version()
import_error: Exception | None = None

try:
    import torch as _torch  # noqa: F401
except (ImportError, OSError) as error:
    # `info` must work without torch, to say what is wrong. Plans for a GPU need no torch either.
    import_error = error

    if not TYPE_CHECKING:  # for a type checker, `__getattr__` would define every name

        def __getattr__(name: str) -> Any:
            if name in __all__:
                raise ImportError(
                    f"storage_ops needs torch, and `import torch` fails: {import_error}"
                )
            raise AttributeError(f"{__name__} has no attribute {name!r}.")

else:
    from storage_ops import _info
    from storage_ops.storage import kernels as _storage_kernels

    _status = _library.load()
    if _warning := _library.warning(_status):
        _warnings.warn(_warning, stacklevel=2)
    _storage_kernels.register(_status)

    from storage_ops import autochunk, graph, losses, memory, policies
    from storage_ops.checkpoint.discard.chain import OutputDiscardChain
    from storage_ops.checkpoint.discard.output_discard import (
        OutputDiscard,
        OutputDiscardCheckpoint,
        output_discard,
    )
    from storage_ops.checkpoint.layers.config import ActivationCheckpointConfig
    from storage_ops.checkpoint.layers.explain_policy import explain_policy
    from storage_ops.checkpoint.layers.report import checkpoint_report
    from storage_ops.checkpoint.layers.tile import tile
    from storage_ops.checkpoint.layers.transform import (
        apply_activation_checkpoint,
        remove_activation_checkpoint,
    )
    from storage_ops.checkpoint.layers.wrapper import CheckpointWrapper
    from storage_ops.checkpoint.state.execution import disable_checkpointing, register_rng_tracker
    from storage_ops.divergence.api import linear_kl_div
    from storage_ops.fitting.calibrate import calibrate
    from storage_ops.fitting.fit import fit
    from storage_ops.fitting.largest import find_largest
    from storage_ops.fitting.plan import FitPlan, load_fit
    from storage_ops.integrations.transformers import patch_causal_lm, unpatch_causal_lm
    from storage_ops.loss.api import linear_cross_entropy
    from storage_ops.loss.module import LinearCrossEntropyLoss
    from storage_ops.loss.planning.plan import plan
    from storage_ops.storage.storage import (
        DiscardedTensorError,
        check_discarded,
        discard_storage,
        is_discarded,
        share_storage,
    )

    def info() -> dict[str, Any]:
        """Return versions, native libraries found, loaded and skipped, and the paths in use.

        Example:
            >>> storage_ops.info()["storage_path"] in ("binding", "alias", "copy")
            True
        """
        return _info.info(_status)


__all__ = [
    "ActivationCheckpointConfig",
    "CheckpointWrapper",
    "DiscardedTensorError",
    "FitPlan",
    "LinearCrossEntropyLoss",
    "OutputDiscard",
    "OutputDiscardChain",
    "OutputDiscardCheckpoint",
    "apply_activation_checkpoint",
    "autochunk",
    "calibrate",
    "check_discarded",
    "checkpoint_report",
    "disable_checkpointing",
    "discard_storage",
    "explain_policy",
    "find_largest",
    "fit",
    "graph",
    "info",
    "is_discarded",
    "linear_cross_entropy",
    "linear_kl_div",
    "load_fit",
    "losses",
    "memory",
    "output_discard",
    "patch_causal_lm",
    "plan",
    "policies",
    "register_rng_tracker",
    "remove_activation_checkpoint",
    "share_storage",
    "tile",
    "unpatch_causal_lm",
]
