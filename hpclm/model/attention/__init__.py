"""Attention: what it sees of a micro-batch, its scores, the kernels that compute them, and the layer."""
