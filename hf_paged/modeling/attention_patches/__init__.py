"""Families whose attention needs help to find its way to the paged cache."""
