"""Hooks in custom training loops, and callbacks for the trainers of Lightning and Transformers."""
