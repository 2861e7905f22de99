"""Quantization that looks at what weights are multiplied with: GPTQ and AWQ, one decoder layer after the other."""
