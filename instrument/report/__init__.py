"""One HTML file that shows a run, or a whole sweep, to whoever opens it: `python -m instrument.report RUN`.

instrument.report.make(run).save("report.html")
"""

from __future__ import annotations

from .numbers import FILE
from .page import Report, check_packages, command_for, make

__all__ = ["FILE", "Report", "check_packages", "command_for", "make"]
