"""The ops: storage, linear cross-entropy, their planner and their definition in plain torch."""
