"""Results of benchmarks: their rows, and the reports, pages and pictures made of them.

A result is what one benchmark wrote on one machine: what it was measured on, and a list of rows.

| where | what |
|---|---|
| `rows.py` | what a row says: its shape, time, peak and curve, and whether it is ours or a peer's |
| `kept.py` | the results in benchmarks/results, and how new ones are taken in |
| `markdown.py` | a report on results, with a section for each |
| `pictures.py` | time against memory, and memory over a step |
| `pages.py` | the sections of the README and of docs/ that say what was measured |
| `__main__.py` | what `make results` runs |
"""
