"""Django management of the staff app."""
