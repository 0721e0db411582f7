"""python -m llamagraph"""

from llamagraph.cli import main

main()
