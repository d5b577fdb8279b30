"""Run with a limit on file sizes, or as another user: `python run_with_limits.py BYTES USER ARGUMENTS`.

BYTES is the largest file size, and USER is a user id; 0 means no change. Another user is needed because root can write
anywhere.
"""

from __future__ import annotations

import os
import resource
import sys

from instrument.__main__ import main

limit, user = int(sys.argv.pop(1)), int(sys.argv.pop(1))
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
if user:
    given, sys.argv = sys.argv, [*sys.argv, "hydra.run.dir=first", "train.steps=2"]
    main()  # Imports all modules of a run, because other users may be unable to read them.
    sys.argv = given
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
main()
