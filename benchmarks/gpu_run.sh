#!/usr/bin/env bash
# Build, test, check and measure on a machine with an NVIDIA GPU. --help explains the options. PYTHON
# is the interpreter with torch.
here=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" "$here/benchmarks/_gpu_run.py" "$@"
