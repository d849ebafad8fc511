"""Results of benchmarks: their rows, and reports, pages and pictures of them.

A result is from one benchmark on one machine. It has the hardware, versions and rows.

| where | what |
|---|---|
| `rows.py` | facts in a row: its shape, time, peak and curve, and whether it is ours or a peer's |
| `kept.py` | the results in benchmarks/results, and the update with new ones |
| `markdown.py` | a report on results, with a section for each |
| `pictures.py` | time against memory, and memory over a step |
| `pages.py` | the sections of the README and of docs/ with measured figures |
| `__main__.py` | the command that `make results` runs |
"""
