"""Compiled steps in which the logits exist in chunks only, whatever the loss."""

from storage_ops.autochunk.backend import chunk
from storage_ops.autochunk.driver import ChunkError
from storage_ops.autochunk.explain import Explanation, explain

__all__ = ["ChunkError", "Explanation", "chunk", "explain"]
