"""From logits to tokens: one file per feature, batched over requests with different parameters."""
