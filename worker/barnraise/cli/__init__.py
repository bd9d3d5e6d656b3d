"""The `barnraise` command, one file for each group of commands."""
