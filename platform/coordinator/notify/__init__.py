"""What people are told without asking: in the site, by e-mail, and by signed webhooks."""
