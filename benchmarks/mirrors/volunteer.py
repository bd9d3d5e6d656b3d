"""The real `barnraise` command of a drill's machine. It is as ever but for one thing: it gives its word for others'
updates every ten seconds instead of every minute, for a drill to see the credit of all of them before it ends."""

from barnraise.cli.main import main
from barnraise.training import attestation

attestation.EVERY = 10.0
main()
