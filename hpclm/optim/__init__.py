"""Optimizer, gradient clipping, learning-rate schedules, loss scale, and checks for divergence."""
