"""Conformance suites, faults, toy checkpoints. Imported by no runtime room."""
