"""Code that setup.py, `make wheel` and the release workflow share. The package lacks it."""
