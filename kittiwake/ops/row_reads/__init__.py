"""Rows of a table on disk, by their numbers: planned, read by threads outside the interpreter lock, decoded to float32.

A *row* is ``row_bytes`` bytes at a known place of a file and decodes to ``row_values`` numbers. A *gather* asks for the
rows ``ids`` and has each written to its place of the output. Every row that is asked for several times is read once,
and rows that lie in one window of the file come with one read. A window begins and ends at multiples of the part's
alignment: 4,096 bytes for direct reads, 1 for buffered ones (the window is then the row itself). Whatever the order in
which reads end, the output is the same.
"""
