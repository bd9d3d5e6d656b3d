"""For the staff: the dashboard, recent errors, announcements, and commands."""
