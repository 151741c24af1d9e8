"""The output of commands, and the files that they save."""
