"""Checkpointing that frees a region's output as well as what it saves."""
