"""The HTTP server: OpenAI's, Anthropic's and SGLang's interfaces to one backend. Read next: `app`."""
