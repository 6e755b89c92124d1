"""Numbers that compiled code and Python share. No Numba here: the parent process imports it."""

LANES = 16
"""Lanes of a vector; rows of matrices are padded to it, and pad lanes are zero."""

ROW_TILE = 512
"""Most rows per matrix product: NumKong reaches 190 GFLOP/s per thread at 512 rows, 138 at 64 (EPYC, bf16)."""

GROUP = 48
"""Inputs of an activation that share a scale where weights are int8."""

SPAN = 4
"""Groups of a weight that share a scale: hidden and intermediate sizes are often multiples of 192."""

PART_BLOCKS = 3
"""Blocks of 16 columns that a part of a product has, as many as our own kernels take at a time: small parts let threads
of unequal speed share evenly. They are a group of the next product's inputs."""

STRIP_ROWS = 64
"""Rows whose gates and ups a thread keeps before it multiplies them, 24 KiB."""

COLUMNS = 24
"""Width of a program's table: the op's code, its operands, and the address of its function last."""

# Op codes: column 0 of a program's table.
EMBEDDING = 0
SELECT_ROWS = 1
RMS_NORM = 2
LINEAR = 3
SILU_AND_MUL = 4
ROPE_AND_CACHE = 5
ATTENTION_FLOAT32 = 6
QUANTIZE = 7
LINEAR_INT8 = 8
GATE_UP_INT8 = 9
ATTENTION_BFLOAT16 = 10
