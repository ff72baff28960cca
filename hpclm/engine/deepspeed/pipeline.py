class PipelineEngine:
    def __init__(self, *a):
        raise NotImplementedError
