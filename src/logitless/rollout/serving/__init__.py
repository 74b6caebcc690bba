"""An engine behind an OpenAI endpoint: requests and replies (`protocol`), HTTP (`handler`), answers (`server`)."""
