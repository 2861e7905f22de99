"""Transformers' own test suites on paged models."""
