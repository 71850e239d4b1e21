"""What the tests share: the float64 oracle, cases, checks, and processes."""
