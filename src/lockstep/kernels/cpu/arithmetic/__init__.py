"""What one thread computes: tiles in registers, spans of keys, and how parts are merged."""
