"""Compiles every Triton kernel for every architecture, without a GPU, and judges the code; `make gates`."""
