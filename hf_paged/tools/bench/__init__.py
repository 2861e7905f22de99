"""Benchmarks: one file each, registered by name; see `session.run_benchmark`."""

# Named here so that the command line can list them without loading torch.
BENCHMARK_HELP = {
    "throughput": "Many requests of mixed lengths at once (W1): output tokens per second.",
    "concurrency": "Output tokens per second with 1, 2, 4 ... 64 requests at a time.",
    "prefix": "Requests that begin with the same 512 tokens (W2), cold.",
    "latency": "One user alone (W3): time to the first token and between tokens.",
    "long": "Four prompts of 4,000 tokens (W4).",
    "step": "What a step of 1, 2, 4 ... 64 requests costs, part by part, beside the floor.",
    "kernels": "Each native CPU operator at the model's shapes: time, rate, share of what the machine allows.",
    "memory": "How much K/V memory is held, how much of it is wasted, and what else a server takes (W1).",
    "quantization": "Quantized weights: size, perplexity, speed of one stream (W3) and of many (W1), memory.",
    "start": "From from_pretrained to the first token, in fresh processes, beside stock Transformers.",
}
