#!/usr/bin/env bash
# Tortures every store, on its oldest and its newest servers, one run after another, and goes on where it
# stopped. Each run is a line of docs/internals/reliability/runs.jsonl, which is all that is remembered.
#
#   ./campaign.sh                         for at most 110 minutes, in runs of two
#   ./campaign.sh --minutes 40 --piece 20
#   ./campaign.sh --only redis,etcd       these stores only
#   ./campaign.sh --help
#
# The servers are those of the tests (./test.sh --install). When it is over, the page is made anew:
#   UPDATE_DOCS=1 cargo test -p leasehold-checks --test docs reliability
set -euo pipefail
cd "$(dirname "$0")"

# As for tests, but for what hears and judges thousands of operations a second.
cargo build --quiet -p leasehold-cli -p leasehold-campaign --all-features \
    --config 'profile.dev.package.leasehold-torture.opt-level=2'
built=${CARGO_TARGET_DIR:-target}/debug
# What is running stays what it was when something is built meanwhile.
programs=$(mktemp -d)
trap 'rm -rf "$programs"' EXIT
cp "$built/leasehold" "$built/leasehold-campaign" "$programs"
mkdir -p docs/internals/reliability
"$programs/leasehold-campaign" --program "$programs/leasehold" "$@"
