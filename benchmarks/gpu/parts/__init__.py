"""The parts of the run, one file each: a function `run` that yields rows of plain values as they become known."""
