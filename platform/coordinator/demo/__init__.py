"""Run a whole platform on one machine, for a demo, the drills and the browser tests."""
