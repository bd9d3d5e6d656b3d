"""`python -m barnraise` is the `barnraise` command."""

from barnraise.cli import main

main()
