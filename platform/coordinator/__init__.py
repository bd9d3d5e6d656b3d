"""The coordinator: a Django site that introduces machines, watches runs and shows them. No weight passes through it."""
