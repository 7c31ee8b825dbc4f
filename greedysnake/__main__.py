"""``python -m greedysnake``."""

from greedysnake.cli.app import main

if __name__ == "__main__":
    main()
