"""What a run needs and how fast it is, by arithmetic without PyTorch; ``fake_gpu``, ``simulate`` and ``ranks`` run a step of any rank
without a GPU."""
