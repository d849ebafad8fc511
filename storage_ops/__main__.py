"""`python -m storage_ops`."""

import sys

from storage_ops.cli import main

sys.exit(main())
