"""The engine: requests, the scheduler, the step loop, sampling, and what `generate` does with them."""
