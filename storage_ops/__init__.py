"""Free an activation's bytes, bind them back in place, and train large models in less memory."""

from storage_ops import _library, _schemas
from storage_ops.ops import storage as _storage

_status = _library.load()
_storage.register(_status.storage_path)

from storage_ops.checkpoint.output_discard import (  # noqa: E402
    OutputDiscard,
    OutputDiscardCheckpoint,
    output_discard,
)
from storage_ops.ops.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from storage_ops.ops.storage import (  # noqa: E402
    DiscardedTensorError,
    check_discarded,
    discard_storage,
    is_discarded,
    share_storage,
)

__all__ = [
    "DiscardedTensorError",
    "OutputDiscard",
    "OutputDiscardCheckpoint",
    "check_discarded",
    "discard_storage",
    "is_discarded",
    "linear_cross_entropy",
    "output_discard",
    "share_storage",
]
