"""Benchmarks: `python -m benchmarks.<stem> [--json OUT]`."""
