"""Conversion of the configuration files of other tools."""
