"""What setup.py, `make wheel` and the release workflow share; not part of the package."""
