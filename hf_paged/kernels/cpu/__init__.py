"""Native operators for CPUs: one library in C++ (`csrc/`), how it arrives, and the Python side of its operators.

Importing this package loads and builds nothing; `library.load()` does, when the first engine on a CPU asks.
"""
