"""Who decided what, when: a log that staff can search and nobody can edit."""
