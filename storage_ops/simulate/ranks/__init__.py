"""One rank of several, simulated alone: its collectives, FSDP2 (`fsdp.py`) and DDP (`ddp.py`)."""
