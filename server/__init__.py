"""The HTTP server: OpenAI's API in front, versions and lanes in the middle, engines behind."""
