"""The commands that take a model: `trace`, `plan`, `bench`."""
