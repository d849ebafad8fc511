"""The shortest account of results: per shape our default or best, and the best peers.

`python -m benchmarks._digest FILE...`
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks._report import is_ours, load, points, shapes


def lines(paths: list[Path]) -> list[str]:
    """One per shape that has ours and something else."""
    found = []
    for result in load(paths):
        for shape, rows in shapes(result).items():
            each = [p for p in points(rows) if not p[0].startswith("floor")]
            ours = [p for p in each if is_ours(p[0])]
            peers = [p for p in each if not is_ours(p[0])]
            if not ours or not peers:
                continue
            text = f"{result['stem']}, {shape}:"
            for who, group in (("ours", ours), ("peers", peers)):
                quick, small = min(group, key=lambda p: p[2]), min(group, key=lambda p: p[1])
                for word, (case, mib, time) in (("fastest", quick), ("smallest", small)):
                    text += f"\n  {word:8} of {who:5} x {time:<7.3f} {mib:>9.1f} MiB  {case}"
            found.append(text)
    return found


if __name__ == "__main__":
    print("\n".join(lines([Path(name) for name in sys.argv[1:]])))
