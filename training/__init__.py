"""Train, export and measure moet-tiny, the demo checkpoint. Not part of the installed package."""
