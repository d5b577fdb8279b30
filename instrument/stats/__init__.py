"""Computation of the statistics that `instrument.tables.statistics` defines."""
