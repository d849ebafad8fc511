"""`storage-ops-plan`: `python -m storage_ops plan` without importing torch, which takes a second.

Importing any module of a package imports the package, and `storage_ops` imports torch. So this
module lies beside it, and has it run as where torch is not installed.
"""

import sys


def main() -> int:
    """Run the command line of `plan`; return the exit code."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None: `import torch` raises
    from storage_ops import cli

    return cli.main(["plan", *sys.argv[1:]])
