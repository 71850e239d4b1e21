"""Benchmarks: time and memory beside stock PyTorch, in the same run. `python -m bench` runs the CPU's."""
