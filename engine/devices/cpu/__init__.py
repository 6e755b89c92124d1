"""The cpu device: a worker process with a team of threads that replays recorded programs.

`open_cpu` and `cpu_memory_facts` are all that the rest of the engine uses. Importing this package costs nothing;
Numba is loaded in the worker only. Read next: `engine/devices/cpu/device.py`, then `engine/devices/cpu/executor.py`.
"""
