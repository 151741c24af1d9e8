"""What both directions of the Hopper path use."""
