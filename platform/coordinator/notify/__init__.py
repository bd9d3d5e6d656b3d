"""Notifications: on the site, by email, and by signed webhooks."""
