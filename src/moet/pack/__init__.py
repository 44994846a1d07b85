"""From a checkpoint's files to expert records, and records kept on disk: the pack."""
