"""`STORAGE_OPS_LOGS=autochunk` prints how the auto-chunker judges a graph."""

from __future__ import annotations

import logging
import os

log = logging.getLogger("storage_ops.autochunk")

if "autochunk" in os.environ.get("STORAGE_OPS_LOGS", "").split(","):
    log.setLevel(logging.DEBUG)
    log.addHandler(logging.StreamHandler())
