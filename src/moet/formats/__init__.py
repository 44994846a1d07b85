"""Bit-level truth of weight and activation formats and of the tile layout. numpy only."""
