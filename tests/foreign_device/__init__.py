"""A device that is none: its memory is the host's, but torch takes it for another one, and refuses what mixes the two.

It shows without a GPU what a GPU would: tensors that are on the wrong device, steps that wait, copies one by one.
"""
