"""Lockstep inside other libraries: one module each. Importing one changes nothing yet."""
