"""`python -m malamute_py.cli`: the command `malamute` without the installed script."""

from malamute_py.cli import main

if __name__ == "__main__":
    main()
