"""``python -m sparsifiner``."""

from sparsifiner.cli.main import run

if __name__ == "__main__":
    run()
