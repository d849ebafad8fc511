"""`storage-ops-plan`: `python -m storage_ops plan` without the second that importing torch takes.

Importing any module of a package imports the package, and `storage_ops` imports torch. So this
module lies beside the package, and runs it as if torch were not installed.
"""

import sys


def main() -> int:
    """Run the command line of `plan`. Return the exit code."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None: `import torch` raises
    from storage_ops import cli

    return cli.main(["plan", *sys.argv[1:]])
