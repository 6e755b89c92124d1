"""Kernels of a few PTX instructions, for tests of single opcodes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gpu_without_gpu import executor
from tests.gpu_without_gpu.executor import Schedule

_SUFFIX = {1: "8", 2: "16", 4: "32", 8: "64"}


def run_lanes(
    code: str,
    inputs: list[NDArray[Any]],
    outputs: list[Any],
    *,
    schedule: Schedule = executor.SCHEDULES[0],
    arch: str = "compute_80",
) -> list[NDArray[Any]]:
    """Run `code` once per element, one warp a block.

    `code` reads registers %a0, %a1, ... (the inputs' elements) and writes %d0, %d1, ... of the output dtypes' sizes.
    """
    n = len(inputs[0])
    arrays = [*inputs, *(executor.poisoned(n, dtype) for dtype in outputs)]
    sizes = [a.dtype.itemsize for a in arrays]
    names = [f"a{i}" for i in range(len(inputs))] + [f"d{i}" for i in range(len(outputs))]
    kernel = executor.load_ptx(_module(code, names, sizes, len(inputs)), arch).kernel("k")
    kernel.launch((-(-n // 32),), (32,), [*arrays, np.int32(n)], schedule=schedule)
    return arrays[len(inputs) :]


def _module(code: str, names: list[str], sizes: list[int], loads: int) -> str:
    # 8-bit values live in 16-bit registers.
    registers = [f".reg .b{max(8 * size, 16)} %{name};" for name, size in zip(names, sizes, strict=True)]
    addresses = [f"ld.param.u64 %p{i}, [p{i}]; mad.wide.u32 %p{i}, %i, {size}, %p{i};" for i, size in enumerate(sizes)]
    moves = [
        f"ld.global.b{_SUFFIX[size]} %{name}, [%p{i}];"
        if i < loads
        else f"st.global.b{_SUFFIX[size]} [%p{i}], %{name};"
        for i, (name, size) in enumerate(zip(names, sizes, strict=True))
    ]
    params = ", ".join([*(f".param .u64 p{i}" for i in range(len(names))), ".param .u32 n"])
    return f"""
.version 9.0
.target sm_80
.address_size 64
.visible .entry k({params})
{{
    .reg .b32 %i, %n, %c;
    .reg .b16 %h<8>; .reg .b32 %r<16>; .reg .b64 %rd<8>; .reg .pred %q<8>;
    .reg .b64 %p<{len(names)}>; .reg .pred %past;
    {" ".join(registers)}
    mov.u32 %i, %ctaid.x; mov.u32 %c, %tid.x; mad.lo.u32 %i, %i, 32, %c;
    ld.param.u32 %n, [n];
    setp.ge.u32 %past, %i, %n;
    @%past bra DONE;
    {" ".join(addresses)}
    {" ".join(moves[:loads])}
    {code}
    {" ".join(moves[loads:])}
DONE:
    ret;
}}
"""
