"""What the staff see and say: a dashboard with live figures, and announcements."""
