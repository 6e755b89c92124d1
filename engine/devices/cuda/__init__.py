"""The cuda device: CuPy for memory, streams and launches, our own kernels for everything else.

CuPy is imported where it is used, so that this package can be imported where there is none.
Read next: `engine/devices/cuda/device.py`.
"""
