"""Verification that record hooks change nothing: the fingerprints of two trainings are compared."""
