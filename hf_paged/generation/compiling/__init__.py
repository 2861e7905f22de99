"""`torch.compile` of the parts of a model that do not attend, inside of engine steps only."""
