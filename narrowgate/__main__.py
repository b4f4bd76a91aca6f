"""`python -m narrowgate`: the command line."""

from narrowgate.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
