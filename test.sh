#!/bin/sh
# Runs every test. What the tests need beside Rust is installed first where it is missing (with
# apt-get, as root or through sudo), or else named.
#
#   ./test.sh                   everything
#   ./test.sh --no-run          only installs and builds
#   ./test.sh -p leasehold      any arguments of `cargo test`
set -eu
cd "$(dirname "$0")"

# The tools, each with the Debian package that has it: a linker, the shells that the command's
# tests write scripts for, and a terminal for those that need one.
tools='cc:gcc cc:libc6-dev bash:bash dash:dash flock:util-linux setsid:util-linux script:bsdutils'

if ! command -v cargo >/dev/null; then
    echo 'test.sh: no cargo: install Rust 1.95 or later first (rustup.rs)' >&2
    exit 1
fi

packages=''
for tool in $tools; do
    command -v "${tool%%:*}" >/dev/null || packages="$packages ${tool#*:}"
done
if [ -n "$packages" ]; then
    if [ "$(id -u)" = 0 ]; then
        as_root=env
    elif sudo -n true 2>/dev/null; then
        as_root='sudo env'
    else
        as_root=''
    fi
    if [ -z "$as_root" ] || ! command -v apt-get >/dev/null; then
        echo "test.sh: missing tools; install these packages, or what they are called here:$packages" >&2
        exit 1
    fi
    echo "test.sh: installing$packages"
    $as_root apt-get -qq update
    # Unquoted: one word for each package.
    $as_root DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $packages
fi

exec cargo test --workspace --all-features "$@"
