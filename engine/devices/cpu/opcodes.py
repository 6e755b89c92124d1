"""Op codes of the interpreter: column 0 of a program's table."""

EMBEDDING = 0
SELECT_ROWS = 1
RMS_NORM = 2
LINEAR = 3
SILU_AND_MUL = 4
ROPE_AND_CACHE = 5
ATTENTION = 6
