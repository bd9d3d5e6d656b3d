"""Talk to coordinators: one client for each mirror, fail-over between them, reports."""
