"""Benchmarks a user can run; results are JSON records."""
