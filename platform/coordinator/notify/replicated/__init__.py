"""Event types of notification preferences and webhooks."""
