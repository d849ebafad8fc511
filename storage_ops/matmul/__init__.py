"""Losses over a vocabulary that is spread over the ranks of a process group."""
