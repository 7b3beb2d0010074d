#!/bin/sh
# The package as it looks when installed, made of links, for mypy and pyright: neither can see
# that kernels/, jobs/ and widgets/ are parts of batchgen.
set -eu
cd "$(dirname "$0")/.."
tree=build/typetree/batchgen
rm -rf build/typetree
mkdir -p "$tree"
for entry in batchgen/*; do
    [ "${entry##*/}" = __pycache__ ] || ln -s "../../../$entry" "$tree/"
done
for folder in kernels jobs widgets; do
    ln -s "../../../$folder" "$tree/$folder"
done
