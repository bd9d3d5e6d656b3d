"""Start training with the computer: `barnraise service`."""
