"""What `hf-paged chat`, `complete` and `generate` do. Only what opens a model of this machine imports torch."""
