"""What the command line runs: the demo, the benchmarks, the packaged model."""
