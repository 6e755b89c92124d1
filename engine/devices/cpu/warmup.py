"""`python -m engine.devices.cpu.warmup`: compile the kernels into the on-disk cache, as `make setup` does."""

import sys

from engine.devices.cpu.executor import compile_kernels

if __name__ == "__main__":
    print("compiling the kernels of the cpu device, once per version", file=sys.stderr)
    compile_kernels()
