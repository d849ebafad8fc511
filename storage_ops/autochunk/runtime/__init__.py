"""The op that processes the tokens chunk by chunk.

`program.py` has the op's text argument: how inputs are cut, the body of a chunk, and how results
are assembled. `chunk_op.py` compiles and runs it. `assemble.py` cuts inputs and collects results.
`inductor.py` avoids known bugs of Inductor.
"""
