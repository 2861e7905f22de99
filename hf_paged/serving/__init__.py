"""An OpenAI-compatible server around the asynchronous engine."""
