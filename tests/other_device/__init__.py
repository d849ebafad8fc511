"""A device that is neither a CPU nor a GPU (`device.cpp`), and checks on it (`run.py`)."""
