"""Run the `barnraise` command of a drill's machine.

It differs from the real one in one point: it attests others' updates every ten seconds instead of
every minute, so that all credit is counted before the drill ends.
"""

from barnraise.cli.main import main
from barnraise.training import attestation

attestation.INTERVAL_SECONDS = 10.0
main()
