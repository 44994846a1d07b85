"""Errors, settings, units, findings, logging: what every room may use. Imports nothing of moet."""
