"""What a run needs and how fast it is: by arithmetic without PyTorch (layout, code, memory, time, forecast, suggest, micro_batch),
or by tracing a step on a GPU that is not there (trace, and the files that it imports)."""
