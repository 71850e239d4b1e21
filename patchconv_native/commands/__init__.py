"""The commands of the command line that take a model: `trace`, `plan`, `bench`."""
