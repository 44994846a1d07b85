"""Where a checkpoint's bytes are: safetensors headers, family name maps, expert byte ranges."""
