"""Third-party trainers and losses; their classes live only here."""
