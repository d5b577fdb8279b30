"""Reading what a run left. Nothing here imports torch."""
