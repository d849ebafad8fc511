"""The op that works through the tokens, chunk by chunk.

`program.py` is the text that the op gets: how inputs are cut, the body of a chunk, and how results
are put together. `chunk_op.py` compiles and runs it. `assemble.py` cuts inputs and collects
results. `inductor.py` avoids known errors of Inductor.
"""
