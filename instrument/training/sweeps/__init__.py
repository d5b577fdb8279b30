"""Sweeps: several runs started by one command."""
