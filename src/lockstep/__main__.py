"""`python -m lockstep`: the command `lockstep`, where its script is not in the path."""

from lockstep.cli import command_line

if __name__ == "__main__":
    command_line()
