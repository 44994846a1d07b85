"""What this machine is: one frozen snapshot, to and from JSON."""
