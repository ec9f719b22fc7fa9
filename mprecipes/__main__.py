# SPDX-License-Identifier: Apache-2.0
"""`python -m mprecipes`: the command line where no console script is installed."""

from mprecipes.tools.cli import main

if __name__ == "__main__":
    main()
