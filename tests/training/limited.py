"""A run with limits on what its process may write: python limited.py BYTES USER ARGUMENTS.

BYTES is what a file may grow to, and USER is who runs it; 0 leaves each as it is. Root may write anywhere.
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
    main()  # imports all that a run needs: other users may be unable to read what root installed
    sys.argv = given
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
main()
