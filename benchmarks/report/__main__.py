"""`python -m benchmarks.report [FILE...]`, which `make results` runs.

Result files are merged into benchmarks/results/<hardware>/. Then a report for each hardware,
the pages with sections of results, and docs/demo.png are rewritten.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from benchmarks._harness import RESULTS, ROOT
from benchmarks.report import markdown, pages, pictures
from benchmarks.report.kept import kept, mark_stale, results_of, take

DEMO = ROOT / "docs" / "demo.png"


def main() -> None:
    """Store results, report on all, rewrite the pages, and draw the demo."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("files", nargs="*", type=Path, help="new results")
    console = Console()
    for path in take(options.parse_args().files):
        console.print(f"taken into {os.path.relpath(path)}")
    for path in mark_stale():
        console.print(f"stale: {path.relative_to(RESULTS)}")
    for hardware, results in kept().items():
        markdown.write(RESULTS / hardware, results, console)
    for page in pages.PAGES:
        page.write_text(pages.filled(page.read_text()))
    pictures.demo(DEMO, next(results_of("demo")))


if __name__ == "__main__":
    main()
