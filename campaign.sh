#!/usr/bin/env bash
# Runs stress tests of every store on its oldest and newest servers, one run after another. It continues where
# it stopped last time. Each run is a line of docs/internals/reliability/runs.jsonl, the only saved state.
#
#   ./campaign.sh                         at most 110 minutes, in runs of two minutes
#   ./campaign.sh --minutes 40 --piece 20
#   ./campaign.sh --only redis,etcd       only these stores
#   ./campaign.sh --help
#
# The servers are those of the tests (./test.sh --install). After a campaign, update the page with:
#   UPDATE_DOCS=1 cargo test -p leasehold-checks --test docs reliability
set -euo pipefail
cd "$(dirname "$0")"

# The same build as for tests, but the code that checks thousands of operations a second is optimized.
cargo build --quiet -p leasehold-cli -p leasehold-campaign --all-features \
    --config 'profile.dev.package.leasehold-torture.opt-level=2'
built=${CARGO_TARGET_DIR:-target}/debug
# Copies the programs, so that a build during the campaign does not change them.
programs=$(mktemp -d)
trap 'rm -rf "$programs"' EXIT
cp "$built/leasehold" "$built/leasehold-campaign" "$programs"
mkdir -p docs/internals/reliability
"$programs/leasehold-campaign" --program "$programs/leasehold" "$@"
