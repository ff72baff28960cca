"""Which weights decay, how far a step goes, and how the learning rate and the loss scale move."""
