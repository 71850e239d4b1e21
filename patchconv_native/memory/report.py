class MemoryReport:
    def __init__(self, trace):
        self.trace = trace
