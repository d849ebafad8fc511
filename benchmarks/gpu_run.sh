#!/usr/bin/env bash
# Build, test, check and measure on a machine with an NVIDIA GPU; --help says how. PYTHON chooses the
# interpreter, that of the torch to run with.
here=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" "$here/benchmarks/_gpu_run.py" "$@"
