"""What commands print, and the files that they save."""
