"""Where expert bytes live, handed out as leases."""
