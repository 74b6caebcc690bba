"""An engine behind an OpenAI endpoint: requests and replies (`protocol`), answers over HTTP (`server`)."""
