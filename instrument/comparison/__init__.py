"""The comparison of what two runs recorded; see `instrument.diff`."""
