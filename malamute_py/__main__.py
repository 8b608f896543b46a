"""`python -m malamute_py`: the command `malamute` of the Python that runs it."""

from malamute_py.cli import main

if __name__ == "__main__":
    main()
