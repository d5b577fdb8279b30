"""The numbers: statistics of a tensor, as `instrument.spec.statistics` defines them."""
