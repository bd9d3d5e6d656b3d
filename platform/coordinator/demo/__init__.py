"""The whole platform on one machine: a site, its servers, an owner, a run and three volunteers."""
