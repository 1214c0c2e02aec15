"""What the kernels, the pool and the files agree on: kinds of rows, lanes of work, how a row that failed is told."""

from __future__ import annotations

KINDS = ("F32", "F16", "BF16", "Q8_0", "IQ4_NL")
"""Kinds of rows, by their names in GGUF and safetensors files; a kernel is given the place in this tuple."""
CODES = {kind: code for code, kind in enumerate(KINDS)}

URGENT, AHEAD = 0, 1
"""The two lanes: readers take from the first as long as anything is left there."""
LANES = 2

# Fields of a lane, int64. TICKET and LIMIT hold the gather's number above bit 32, a count of jobs below. END_NS is 0 until
# the last job is done: it tells that a gather is over, the byte in the lane's pipe only that it is worth a look.
TICKET, LIMIT, DONE, READS, BYTES, END_NS = range(6)
UNIQUE, JOB_PARTS, JOB_FIRST, MISSES, BEGINS, PACKED, STATUS, TARGET_FIRST, TARGETS, OUT, OUT_ROWS = range(6, 17)
FIELDS = 24  # whole cache lines, so that the lanes do not share one
STOP = LANES * FIELDS
"""Behind the lanes: whether readers shall end."""

READ_OK, CUT_SHORT, NOT_FINITE = 0, -1, -2
"""Status of a row; above 0 it is the system's error number."""
