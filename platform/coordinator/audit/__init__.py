"""Record who decided what and when, in a log that staff can search and nobody can edit."""
