"""Exams a user can run: bits and quality."""
