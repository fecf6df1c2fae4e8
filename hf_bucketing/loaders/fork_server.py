"""Imported by the fork server of workers alone, which then ignores SIGTERM, as schedulers send it to all processes.

torch's workers end when the process that forked them has ended, and the training process may still need their batches
to end its step. Processes that the server forks take the signal as ever.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

if any(argument.startswith("from multiprocessing.forkserver import main") for argument in sys.orig_argv):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
