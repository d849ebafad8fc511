"""One rank of several, simulated alone: collectives, FSDP2 and DDP."""
