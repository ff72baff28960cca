"""Forecasts of a run's memory and speed, by arithmetic without PyTorch; `fake_gpu`, `simulate` and `ranks` run a step of any rank
without a GPU."""
