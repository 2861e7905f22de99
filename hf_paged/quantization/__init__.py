"""Checkpoints with quantized weights: one file a format, one registry (`FORMATS`), one module (`QuantizedLinear`)."""

from __future__ import annotations

from . import awq, compressed_tensors, fbgemm_fp8, fine_grained_fp8, gptq  # each registers its formats

__all__ = ["awq", "compressed_tensors", "fbgemm_fp8", "fine_grained_fp8", "gptq"]
