"""``python -m moet``."""

from moet.cli.main import main

if __name__ == "__main__":
    main()
