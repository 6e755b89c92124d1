"""Paged attention: shares units of work out and picks the code for how keys and values are stored.

Read next: `engine/devices/cpu/kernels/attention_bfloat16.py`, `engine/devices/cpu/kernels/attention_float32.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from engine.devices.cpu.kernels.attention_bfloat16 import attend_bfloat16
from engine.devices.cpu.kernels.attention_float32 import attend_float32
from engine.devices.cpu.kernels.jit import inner


@inner
def attention(op, items, begin, end, parts, thread):
    """op: queries, out, keys pages, values pages, block table, items, heads, kv heads, head_dim, block_size,
    blocks per row, pages (0 float32, 1 bfloat16, 2 and 3 the same rounded to int8), window or 0, scratch, its stride
    per thread, out is bfloat16, scales of keys and of values, bytes from a
    block to the next and from a head to the next. Queries are bfloat16 where pages are odd.

    items: [items, 4] int32 of first token, tokens, row, position of the first token. A part is every `parts`-th
    unit; the first part begins with the last unit, the longest. Units of a kv head follow each other: a head's pages of
    1,000 tokens, where rows share them, stay in a thread's second cache.
    """
    units = items * op[8]
    for part in range(begin, end):
        for unit in range(units - 1 - part, -1, -parts):
            if op[12] % 2 == 1:
                attend_bfloat16(op, unit % items, unit // items, thread)
            else:
                attend_float32(op, unit % items, unit // items, thread)
