"""hf_paged against its peers on a CPU; see README.md beside this file. Run with `make bench-cpu`."""
