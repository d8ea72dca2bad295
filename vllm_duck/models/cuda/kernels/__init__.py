"""The GPU host's kernels in Triton, one family a file.

One set serves one row and a prompt, from compute capability 8.0 on. Invariants, pinned
by tests:
- a row's bits are its own: an element of a result has one order of additions, whatever
  the number of rows; no sum is made by atomics, and no tile is chosen by time;
- memory holds bf16 as uint16 and e4m3 as uint8, registers hold fp32: `formats` alone
  names another type;
- what a row enters a matrix with is *lifted*: its bf16 bits stand for 2**100 times the
  number, because e4m3 codes, read as bf16, stand for 2**-120 times theirs.
Every wrapper checks what it is given, allocates nothing, and returns when its kernel
is enqueued.
"""
