"""Checkpointing: regions whose output is freed too, and layers of a model chosen by a config."""
