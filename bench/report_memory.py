def sections(data): return []
