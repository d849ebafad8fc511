"""A device that is neither a CPU nor a GPU (`device.cpp`), and what runs on it (`run.py`)."""
