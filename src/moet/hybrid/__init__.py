"""The step: routed experts planned, bound and run. The hot path."""
