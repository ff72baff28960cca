"""Attention: the inputs derived from a micro-batch, scores, the kernels that compute them, and the layer."""
