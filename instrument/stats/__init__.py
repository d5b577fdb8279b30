"""Computation of the statistics that `instrument.spec.statistics` defines."""
