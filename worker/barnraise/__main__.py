"""`python -m barnraise` is the `barnraise` command."""

from barnraise.cli.main import main

main()
