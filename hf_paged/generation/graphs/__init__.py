"""Decoding steps that are captured once and replayed: one launch instead of one for each kernel."""
