"""Tests of `hf_paged.generation.compiling`."""
