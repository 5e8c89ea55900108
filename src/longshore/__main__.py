"""`python -m longshore`: the command `longshore`."""

from longshore.cli import main

if __name__ == "__main__":
    main()
