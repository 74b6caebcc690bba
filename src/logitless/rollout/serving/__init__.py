"""An engine behind an OpenAI endpoint: what is said (`protocol`), who answers (`server`), and HTTP (`handler`)."""
