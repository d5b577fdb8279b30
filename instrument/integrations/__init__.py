"""Hooks in custom training loops, and callbacks for the trainers of Lightning and Transformers."""

HOOKS, OUT = "INSTRUMENT_HOOKS", "INSTRUMENT_OUT"
"""The environment variables of callbacks without code."""
