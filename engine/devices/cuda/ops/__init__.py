"""Launching kernels: one module per family of cuda_src/, with the table that picks a version.

Each module has functions that compute grid, block and shared memory and launch on the stream they are given, and
`variants(...)`, which lists every `Variant` those functions can ask the registry for on a given architecture, dtype
and model, so that `engine compile` and the start of the device know them before the first step.
Arrays are CuPy arrays, allocated by the caller; nothing here allocates. Read next: `engine/devices/cuda/registry.py`.
"""
