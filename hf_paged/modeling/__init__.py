"""What a model's layers are and need, found by looking at the model."""
