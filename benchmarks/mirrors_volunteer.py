"""The real `barnraise` command of a drill's machine, as ever but for two things: it gives its word for others' updates
every ten seconds instead of every minute, so that a drill sees the credit of all of them before it ends; and where the
system can, whatever a mirror does goes before it, for it would have cores of its own."""

import os

from barnraise import witnessing
from barnraise.cli import main

if hasattr(os, "SCHED_IDLE"):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
witnessing.EVERY = 10.0
main()
