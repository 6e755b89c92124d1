"""Which columns of a packed weight a run of parts is; weights lie in panels of columns."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from engine.devices.cpu.kernels.constants import LANES
from engine.devices.cpu.kernels.jit import inner
from engine.devices.cpu.kernels.simd import i64_pointer, pad


@inner
def run_of(op, begin, end, part_blocks):
    """What of parts [begin, end) lies in one panel: its address, columns, first and number of 16-column blocks to do,
    first column, the part that follows."""
    panels, panel, part = i64_pointer(op[5]), begin // op[7], begin % op[7]
    packed, column, columns = panels[3 * panel], panels[3 * panel + 1], panels[3 * panel + 2]
    following = min(end, (panel + 1) * op[7])
    block = part * part_blocks
    blocks = min((following - begin) * part_blocks, pad(columns) // LANES - block)
    return packed, columns, block, blocks, column + block * LANES, following
