"""vLLM, met only here."""
