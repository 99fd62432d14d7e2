"""OpenAI's API over HTTP."""

TOKEN_GAP = 0.5  # seconds, EngineConfig.max_token_gap of a server: who reads along notices a longer stop
