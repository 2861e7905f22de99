"""What the parts of a decoder look like in any family, found by what modules contain and compute, never by a name."""
