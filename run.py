"""`resnet8ptq run` from a checkout: quantize, evaluate and track; see --help."""

import sys

from resnet8ptq.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
